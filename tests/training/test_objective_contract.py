"""What every objective promises to the loop, built-in or custom."""

import shutil
from pathlib import Path

import pytest
import torch

from hyvideo.checks.rules import check
from hyvideo.distributed.mesh import Mesh
from hyvideo.planning.hours import forwards_per_rollout
from hyvideo.records.metric_table import find
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import collect
from hyvideo.training.rollout_batch import chunks
from tests.distributed.launch import launch
from tests.forked import ROOT
from tests.rated_pairs import DPO, PROMPTS, write_pairs
from tests.shallow import SHALLOW
from tests.test_trainer import CPU, weights, without_times
from tests.training.test_reward_gradient import Contrast

LEVELS = {"eta": 0.0, "nft_levels": 2}
SFT = {"kl_strategy": "none", "nft_levels": 2, "num_generations": 1}
# Four rollouts of three steps, two of each of two prompts.
SETTINGS = {
    "pretrained_model_root": SHALLOW,
    "batch_size": 4,
    "num_generations": 2,
    "grpo_sampling_steps": 3,
    "reward_weights": '{"VQ": 0.5, "MQ": 2}',
    "valid_video_csv": "",
    "cfg_scale": 1.0,
    "mini_batch_size_per_update": 4,
    "kl_strategy": "fixed",
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-2,  # rounding errors of tiny gradients do not become full steps
    "report_to": ["none"],
    "log_video_interval": 0,
    "report": False,
    "num_threads": 1,
}
OBJECTIVES = {
    "grpo": {"anchor_fraction": 0.5, "cfg_scale": 2.0, "batched_forward": "false"},
    # two updates, so that the second needs old velocities
    "nft": LEVELS
    | {
        "objective": "nft",
        "num_updates_per_rollout": 2,
        "mini_batch_size_per_update": 2,
        "anchor_cfg_scale": 2.0,
        "anchor_fraction": 0.5,
    },
    "nft of a flow map": LEVELS
    | {
        "objective": "nft",
        "transformer_version": "miniature_flow_map",
        "anchor_cfg_scale": 3.0,
        "grpo_sampling_steps": 2,
    },
    "nft and reward": {"objective": "nft", "reward_gradient_weight": 0.1} | LEVELS,
    "draft": {"objective": "draft"} | LEVELS,
    "dpo": DPO,
    "distill": {
        "objective": "distill",
        "eta": 0.0,
        "grpo_sampling_steps": 2,
        "anchor_cfg_scale": 3.0,
    },
    "regression": {"objective": f"{ROOT}/examples/custom_objective.py:WeightedRegression"} | LEVELS,
    "sft": SFT | {"objective": "sft"},
    "folders": SFT | {"objective": f"{ROOT}/examples/custom_data.py:PromptFolders"},
}


# Those whose resume is in the default suite; test_run_state.py has that of grpo.
QUICK = ("nft of a flow map", "dpo", "distill", "sft")


def trainer_of(name, folder, mesh, **changes):
    """Return a trainer of an objective, which finds its videos in ``folder / "videos"``."""
    settings = SETTINGS | OBJECTIVES[name]
    if name == "dpo":
        settings |= {"pairs_csv": [str(folder / "videos" / "pairs.csv")]}
    if name == "sft":
        settings |= {"videos_csv": [str(folder / "videos" / "videos.csv")]}
    if name == "folders":
        settings |= {"prompt_folders": [str(folder / prompt) for prompt in PROMPTS]}
    settings |= {"output_dir": str(folder / name)} | changes
    config = load_config("configs/smoke.yaml", num_updates_per_rollout=1).with_settings(**settings)
    check(config, mesh.world_size)
    return Trainer(config, mesh, CPU, scorers={"test": Contrast()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with rated pairs, a table of videos, and folders of videos by prompt."""
    folder = tmp_path_factory.mktemp("objectives")
    pairs = write_pairs(folder / "videos")
    rows = "".join(f"{prompt},{row}a.mp4\n" for row, prompt in enumerate(PROMPTS))
    pairs.with_name("videos.csv").write_text(f"prompt,video\n{rows}")
    for row, prompt in enumerate(PROMPTS):
        (folder / prompt).mkdir()
        shutil.copy(pairs.with_name(f"{row}a.mp4"), folder / prompt)
    return folder


def gradient_of(trainer, collected, rows_per_pass):
    """Return the gradient of the mean loss, from passes of some rows."""
    update, policy = trainer.run.update, trainer.run.policy
    terms_of = (update.reward_term or update.objective).terms
    rollouts = collected.rollouts
    policy.optimizers.zero_grad()
    for rows in chunks(range(len(rollouts)), rows_per_pass):
        for column in rollouts.all_columns:
            terms = terms_of(rollouts, collected.reference, rows, column, kl_coefficient=0.1)
            assert terms.metrics.keys() == set(update.metrics)
            assert all(value.isfinite().all() for value in (terms.loss, terms.kl))
            # the policy is still that of the rollouts
            torch.testing.assert_close(
                terms.deviation, torch.zeros_like(terms.deviation), rtol=0, atol=1e-5
            )
            (terms.loss.sum() / len(rollouts)).backward()
    gradients = [p.grad.flatten() for p in policy.parameters if p.grad is not None]
    policy.optimizers.zero_grad()
    return torch.cat(gradients)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_an_iteration_does_not_depend_on_the_rows_of_a_pass(name, folder, tmp_path):
    trainer = trainer_of(name, folder, Mesh.single(), output_dir=str(tmp_path))
    trainer.iteration = 1
    collected = collect(trainer.run, trainer.iteration)
    rollouts = collected.rollouts
    assert len(rollouts) == trainer.run.inputs.plan.rollouts == len(rollouts.advantages)
    assert len(rollouts.all_columns) == rollouts.trained_steps.shape[1] > 0
    assert rollouts.advantages.isfinite().all()
    if rollouts.advantages.any():  # in groups of two, those of both pairs of rows are equal
        advantages = torch.tensor([1.5, -0.4, 0.7, -1.1])
        rollouts = rollouts.with_rewards(rollouts.rewards, advantages)
        collected = collected._replace(rollouts=rollouts)
    of_pairs, of_all = (gradient_of(trainer, collected, rows) for rows in (2, len(rollouts)))
    assert of_all.norm() > 0
    assert (of_pairs - of_all).norm() <= 1e-3 * of_all.norm()


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.system)
        for name in OBJECTIVES
    ],
)
def test_a_resumed_run_continues_as_the_uninterrupted_run_and_costs_what_is_planned(
    name, folder, tmp_path
):
    """The policy differs from its anchor in the second iteration, so that nothing is left out."""
    trainer = trainer_of(name, folder, Mesh.single(), output_dir=str(tmp_path / "whole"))
    objective, before = trainer.run.objective, weights(trainer)
    trainer.iteration = 1
    trainer.run_iteration()
    checkpoint = trainer.run.state.save()
    trainer.run.state.checkpoints.wait()
    calls = {False: 0, True: 0}  # rows of forward passes, by whether a gradient is computed

    def count(module, inputs, options):
        calls[torch.is_grad_enabled()] += len(inputs[0])

    hook = trainer.run.policy.transformer.register_forward_pre_hook(count, with_kwargs=True)
    trainer.iteration = 2
    metrics = trainer.run_iteration()
    hook.remove()
    assert {*objective.metrics, *objective.deviation_names} <= metrics.keys()
    if ".py:" not in trainer.config.objective.name:  # a custom one may have others
        assert [each for each in metrics if not find(each)] == []
    assert metrics["grad/norm"] > 0
    assert not all(map(torch.equal, before, weights(trainer)))
    made = calls[False] + objective.cost.per_training_pass * calls[True]
    rollouts = trainer.run.inputs.plan.rollouts
    assert metrics["cost/forwards"] == pytest.approx(made / rollouts)
    planned = forwards_per_rollout(trainer.run.loaded.planned_run)
    assert metrics["cost/forwards"] == pytest.approx(planned)

    resumed = trainer_of(
        name,
        folder,
        Mesh.single(),
        output_dir=str(tmp_path / "resumed"),
        resume_from_checkpoint=str(checkpoint),
    )
    assert resumed.iteration == 1
    resumed.iteration = 2
    assert repr(without_times(resumed.run_iteration())) == repr(without_times(metrics))
    assert all(map(torch.equal, weights(trainer), weights(resumed)))


# tests/distributed has the same of grpo.
RANKED = ("nft of a flow map", "nft and reward", "draft", "dpo", "distill", "sft")


def train_each(folder, num_ranks):
    """Return the metrics of two iterations of each objective, and the size of the weights."""
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.sharded_tensors import full_tensor

    mesh, found = ranks.start(1, CPU), {}
    for name in RANKED:
        batch = SETTINGS["batch_size"] // num_ranks
        layout = {"batch_size": batch, "enable_fsdp": num_ranks > 1}
        layout["output_dir"] = f"{folder}/{num_ranks}/{name}"
        trainer = trainer_of(name, Path(folder), mesh, **layout)
        objective, lines = trainer.run.objective, []
        for trainer.iteration in (1, 2):
            metrics = trainer.run_iteration()
            lines.append({n: metrics[n] for n in (*objective.metrics, "loss/total", "grad/norm")})
        sizes = [full_tensor(p).double().square().sum().item() for p in weights(trainer)]
        found[name] = lines, sizes
    return found


@pytest.mark.system
def test_two_ranks_train_each_objective_like_one(folder):
    target = "tests.training.test_objective_contract:train_each"
    (single,) = launch(target, 1, str(folder), 1)
    for found in launch(target, 2, str(folder), 2):
        for name, (lines, sizes) in single.items():
            other_lines, other_sizes = found[name]
            for line, other in zip(lines, other_lines, strict=True):
                assert other == pytest.approx(line, rel=1e-3, abs=1e-6, nan_ok=True), name
            assert other_sizes == pytest.approx(sizes, rel=1e-5, abs=1e-8), name
