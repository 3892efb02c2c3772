"""The on-policy check passes if rollout and update agree, and names the first
module that differs.
"""

import dataclasses
import re

import pytest
import torch
from torch import nn

from hyvideo.models.conditions import Conditions
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from hyvideo.training.on_policy_check import OffPolicyError, log_ratio_tolerances
from tests.distributed.launch import launch
from tests.shallow import SHALLOW

CPU = torch.device("cpu")
# random weights hardly respond to a timestep of 752 instead of 750
TRAINED = {"pretrained_model_root": "assets/miniature", "random_weights": False}


def in_training(change):
    """Return a hook that changes the output in the training path only."""

    def hook(_module, _inputs, output):
        return change(output) if torch.is_grad_enabled() else None

    return hook


def enable_dropout(trainer):
    trainer.run.policy.transformer.train()
    for module in trainer.run.policy.transformer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2


def compute_in_bf16(trainer):
    trainer.run.pipeline.compute_dtype = torch.bfloat16


def round_timesteps_in_the_rollout(trainer):
    def rounded(_module, arguments, options):
        if not torch.is_grad_enabled():
            return arguments, options | {"timestep": options["timestep"].bfloat16().float()}
        return None

    trainer.run.policy.transformer.register_forward_pre_hook(rounded, with_kwargs=True)


def guide_one_by_one(trainer):
    trainer.run.pipeline.sampling = dataclasses.replace(
        trainer.run.pipeline.sampling, batched_forward=False
    )


def check_message(config, mesh, *, before=(), between=()):
    """Return the message of the check for faults injected before the rollout and between rollout
    and update.
    """
    trainer = Trainer(config, mesh, CPU)
    for fault in before:
        fault(trainer)
    anchor_means = trainer.run.objective.prepare

    def faulty(rollouts):
        for fault in between:
            fault(trainer)
        return anchor_means(rollouts)

    trainer.run.objective.prepare = faulty
    trainer.iteration = 1
    weights = [parameter.detach().clone() for parameter in trainer.run.policy.parameters]
    with pytest.raises(OffPolicyError) as error:
        trainer.run_iteration()
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.run.policy.parameters))
    return str(error.value)


@pytest.mark.system
@pytest.mark.parametrize(
    "settings, before, between, module",
    [
        ({}, [], [enable_dropout], "context_embedder (HunyuanVideo15TokenRefiner)"),
        ({}, [], [compute_in_bf16], "none"),
        (TRAINED, [round_timesteps_in_the_rollout], [], "time_embed"),
    ],
)
def test_an_injected_fault_is_found_and_the_first_module_named(
    tiny_config, mesh, settings, before, between, module
):
    message = check_message(
        tiny_config.with_settings(**settings), mesh, before=before, between=between
    )
    assert (
        "iteration 1: rollout and update compute different log-probabilities. On rank 0" in message
    )
    assert f"first module that differs: {module}" in message, message
    step, sigma = re.search(r"at step (\d+), at sigma ([\d.]+),", message).groups()
    sigmas = tiny_config.with_settings(**settings).sampling.schedule().sigmas
    assert sigma == f"{sigmas[int(step) - 1]:.3g}"


def test_a_forward_pass_that_mixes_the_rows_of_a_batch_is_suspected_in_fp32(tiny_config, mesh):
    """The message of a new family blamed the rounding of bf16, in a run in fp32."""

    def mix_rows(trainer):
        def mixed(_module, _inputs, output):
            return output + 0.1 * output.mean(0, keepdim=True)

        trainer.run.policy.transformer.register_forward_hook(mixed)

    config = tiny_config.with_settings(mini_batch_size_per_update=2)
    message = check_message(config, mesh, before=[mix_rows])
    assert "8 samples in the rollout, 2 in the update" in message
    assert "mixes the rows of a batch" in message and "bf16" not in message


def test_a_fault_of_the_training_path_alone_is_found_without_gradient(tiny_config, mesh):
    def fault(trainer):
        part = trainer.run.policy.transformer.context_embedder
        part.register_forward_hook(in_training(lambda output: output * 1.01))

    message = check_message(tiny_config, mesh, between=[fault])
    assert "first module that differs: context_embedder (HunyuanVideo15TokenRef" in message


@pytest.mark.system
def test_the_bf16_tolerance_is_wide_only_for_calls_of_different_shapes(tiny_config, mesh):
    config = tiny_config.with_settings(dtype="bf16", cfg_scale=2.0, grpo_sampling_steps=2)
    trainer = Trainer(config, mesh, CPU)
    rollouts, _ = sample(trainer.run, 1)
    samples = rollouts.conditions.samples
    shorter = dataclasses.replace(samples[0], text=samples[0].text[:-1])
    rollouts = dataclasses.replace(rollouts, conditions=Conditions((shorter,) * 4 + samples[4:]))

    def check(*rows, deviation):
        zeros = [torch.zeros(())] * (len(rows) - 1)
        trainer.run.objective.on_policy_check(
            rollouts, [(part, 0) for part in rows], [*zeros, torch.tensor(deviation)], 1
        )

    as_sampled, rotated = [*range(8)], [*range(4, 8), *range(4)]
    check(as_sampled, deviation=0.9e-6)
    check(as_sampled, rotated, deviation=0.9e-4)  # the shorter texts are in other rows
    check(as_sampled, [4, 5], deviation=0.9e-4)
    with pytest.raises(OffPolicyError, match="the tolerance of 1e-06") as error:
        check(as_sampled, deviation=1.1e-6)
    assert "have equal shapes" in str(error.value)
    shapes = "8 samples in the rollout, 2 in the update"
    with pytest.raises(
        OffPolicyError, match=f"the tolerance of 0.0001(?s:.*){shapes}.* --batched_forward false"
    ):
        check(as_sampled, [0, 1], deviation=1.1e-4)
    with pytest.raises(OffPolicyError, match="texts of other lengths"):
        check(as_sampled, rotated, deviation=1.1e-4)
    guide_one_by_one(trainer)
    with pytest.raises(OffPolicyError, match="the tolerance of 1e-06"):
        check([0], [4], deviation=1.1e-6)
    assert log_ratio_tolerances(config.objective, "fp32") == (1e-6, 1e-6)


def check_with(settings, deviations_by_rank):
    """Return for each case the message on this rank, the rows of the repeated pass, and the
    transformer's calls.
    """
    from hyvideo.distributed import mesh as ranks
    from hyvideo.settings.command_line import load_config

    mesh = ranks.start(1, CPU)
    trainer = Trainer(load_config("configs/smoke.yaml", **settings), mesh, CPU)
    rollouts, _ = sample(trainer.run, 1)
    check, repeated, calls = trainer.run.objective.on_policy_check, [], []
    diagnosis = check._diagnosis
    check._diagnosis = lambda rollouts, a_pass, *others: (
        repeated.append(a_pass[0]) or diagnosis(rollouts, a_pass, *others)
    )
    trainer.run.policy.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    passes = [([0, 1], 0), ([2], 0), ([], 0)]
    found = []
    for deviations in deviations_by_rank[mesh.rank]:
        calls.clear()
        try:
            check(rollouts, passes, [torch.tensor(value) for value in deviations], 1)
            message = ""
        except OffPolicyError as error:
            message = str(error)
        found.append((message, repeated[-1] if message else None, len(calls)))
    return found


@pytest.mark.system
def test_all_ranks_repeat_the_pass_with_the_largest_deviation_of_any_rank(tmp_path):
    """Ranks that repeat passes of other sizes make other numbers of calls, which hangs
    with FSDP.
    """
    settings = {
        "output_dir": str(tmp_path),
        "valid_video_csv": "",
        "log_video_interval": 0,
        "num_threads": 1,
    }
    settings |= {"pretrained_model_root": SHALLOW, "cfg_scale": 1.0, "grpo_sampling_steps": 2}
    settings |= {"batch_size": 4, "num_generations": 4, "batched_forward": "false"}
    # deviations of the three passes on rank 0, the same on rank 1, rows of the repeated pass, worst
    # rank
    cases = [
        ([0.3, 0.1, 0.0], [0.1, 0.5, 0.0], [2], 1),
        ([0.1, 0.2, 0.0], [0.9, 0.5, 0.0], [0, 1], 1),
        ([0.1, 0.2, 0.4], [0.3, 0.0, 0.0], [], 0),
        ([0.1, 0.2, 0.0], [0.0, 0.0, 0.0], [2], 0),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], None, None),
    ]
    by_rank = [[case[rank] for case in cases] for rank in (0, 1)]
    found = launch("tests.training.test_on_policy_check:check_with", 2, settings, by_rank)
    for (*_, rows, worst), *results in zip(cases, *found):
        for rank, (message, repeated, _) in enumerate(results):
            assert repeated == rows
            names_another_rank = message.startswith(
                f"rank {worst} has the largest deviation; on this rank: "
            )
            assert names_another_rank == (worst not in (rank, None))
            assert bool(message) == (worst is not None)
        first, second = (calls for *_, calls in results)
        assert first == second
