"""Training with objective nft, and its checks of the old policy."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from hyvideo.rewards.rewards import Reward
from hyvideo.settings.command_line import load_config
from hyvideo.trainer import Trainer
from hyvideo.training.objectives.nft import NFT as NFTObjective
from hyvideo.training.objectives.nft import Velocities
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.rollout_batch import Pass
from tests.training.test_policy_update import BOTH_KL_TERMS

CPU = torch.device("cpu")
NFT = {
    "objective": "nft",
    "nft_levels": 2,
    "eta": 0.0,
    "random_weights": False,
    "num_updates_per_rollout": 2,
}


@pytest.fixture
def trainer(tiny_config, mesh, tmp_path):
    settings = NFT | {
        "output_dir": str(tmp_path),
        "learning_rate": 1e-3,
        "update_ref_model_step": 2,
    }
    return Trainer(tiny_config.with_settings(**settings), mesh, CPU)


def sample_rollouts(trainer):
    trainer.iteration = 1
    rollouts, pending = trainer.run.source.collect(trainer.run.objective, 1, is_scored=True)
    rewards = trainer.run.rewards.wait(pending)
    return rollouts.with_rewards(
        rewards, trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    )


def test_each_rollout_has_separate_noise_levels_that_cover_the_range(trainer):
    levels = trainer.run.source.noise.levels(1, trainer.run.source.indices(), 4, shift=1.0)
    assert (levels.sort(1).values * 4).floor().tolist() == [[0, 1, 2, 3]] * len(levels)
    assert len(levels.unique()) == levels.numel()


def test_rollouts_keep_only_the_latents_that_the_update_reads(trainer):
    """The update needs the final latents, and its check the first step; grpo needs every step."""
    assert trainer.config.rollout.grpo_sampling_steps > 2
    assert sample_rollouts(trainer).trajectories.latents.shape[1] == 3
    trainer = Trainer(trainer.config.with_settings(objective="grpo", eta=0.5), trainer.mesh, CPU)
    num_steps = trainer.config.rollout.grpo_sampling_steps
    assert sample_rollouts(trainer).trajectories.latents.shape[1] == num_steps + 1


def test_with_a_guidance_interval_all_rollouts_train_the_same_levels_and_the_cost_counts_their_branches(
    trainer,
):
    config = trainer.config.with_settings(cfg_scale=2.0, guidance_interval="0.5:1")
    trainer = Trainer(config, trainer.mesh, CPU)
    rollouts = sample_rollouts(trainer)
    levels = rollouts.trained_steps
    assert levels.shape == (8, 2) and torch.equal(levels, levels[:1].expand_as(levels))
    trainer.run.objective.cost.forwards = 0
    trainer.run.objective.prepare(rollouts)
    branches = 1 + (levels[0] >= 0.5).int()
    # four rows of the second update, and one row
    assert trainer.run.objective.cost.forwards == 4 * branches.sum() + branches[0]


@pytest.mark.slow
@pytest.mark.parametrize("iteration, is_checked", [(1, True), (2, False), (3, True)])
def test_the_cost_counts_every_forward_pass_also_of_the_check(trainer, iteration, is_checked):
    changes = {
        "gate_interval": 2,
        "batched_forward": "false",
        "cfg_scale": 2.0,
        "kl_strategy": "fixed",
    }
    trainer = Trainer(trainer.config.with_settings(**changes), trainer.mesh, CPU)
    calls = {False: 0, True: 0}  # by whether a gradient is computed

    def count(module, inputs, options):
        calls[torch.is_grad_enabled()] += 1

    trainer.run.policy.transformer.register_forward_pre_hook(count, with_kwargs=True)
    trainer.iteration = iteration
    num_forwards = 8 * trainer.run_iteration()["cost/forwards"]
    assert calls[False] + trainer.run.objective.cost.per_training_pass * calls[
        True
    ] == pytest.approx(num_forwards)
    of_check = calls[False] - 2 * 8 * trainer.config.rollout.grpo_sampling_steps - 2 * (4 * 2 + 1)
    # two calls of two branches, besides sampling and old velocities
    assert of_check == (4 if is_checked else 0)


def test_an_iteration_trains_and_the_old_policy_stays_the_rollout_policy(trainer):
    assert isinstance(trainer.run.objective, NFTObjective)
    rollouts = sample_rollouts(trainer)
    reference = trainer.run.objective.prepare(rollouts)
    metrics = trainer.run.update(rollouts, reference, 1)
    # Rollout and update have different batch shapes, which round differently on some processors.
    assert metrics["nft/distance_first"] <= 1e-5 < metrics["nft/distance_max"]
    assert metrics["kl/velocity"] > 0 and metrics["grad/norm"] > 0
    # noise levels are trained, not steps
    assert not [name for name in metrics if name.startswith("by_step/")]
    with torch.no_grad():  # the policy has moved away from the old policy
        now = trainer.run.objective.velocity_and_target(rollouts, [0], 0)[0]
    assert {row for row, _ in reference.old} == {0, 1, 2, 3}
    assert not torch.equal(now[0], reference.old[0, 0])


@pytest.mark.slow
def test_old_velocities_of_the_first_update_would_change_no_metric(trainer):
    """In iteration 1 the old velocities are also the anchor's.

    Rows 4 to 7 belong to the first update.
    """
    found = []
    for computes_all in (False, True):
        trainer = Trainer(trainer.config.with_settings(anchor_fraction=0.5), trainer.mesh, CPU)
        rollouts = sample_rollouts(trainer)
        anchor = trainer.run.objective.prepare(rollouts)
        for column in rollouts.columns if computes_all else ():
            rows = [4, 5, 6, 7]
            velocities = trainer.run.objective.predict(rollouts, rows, column)
            anchor.old.update(((row, column), velocity) for row, velocity in zip(rows, velocities))
        found.append(trainer.run.update(rollouts, anchor, 1))
    assert found[0] == found[1] and found[0]["kl/position"] > 0


EQUATION = (
    NFT
    | BOTH_KL_TERMS
    | {
        "gate_interval": 0,
        "cfg_scale": 2.0,
        "max_grad_norm": 1e9,
        "advantage_clip": 2.0,
    }
)


def velocities_and_targets(trainer, rollouts, column, scale):
    """Compute the guided velocity of every re-noised rollout and its target, as docs/algorithms.md
    defines them.
    """
    pipeline, levels = trainer.run.pipeline, rollouts.trained_steps[:, column]
    final = rollouts.trajectories.latents[:, -1]
    noise = torch.stack(
        [trainer.run.source.noise.for_renoising(1, index, column) for index in rollouts.indices]
    )
    noised = torch.stack([(1 - s) * x + s * e for s, x, e in zip(levels, final, noise)])
    times = [(1000.0 * level, None) for level in levels.tolist()]
    conditional = pipeline._forward(noised, times, rollouts.conditions)
    unconditional = pipeline._forward(
        noised, times, rollouts.conditions.with_text_of(pipeline.negative)
    )
    return unconditional + scale * (conditional - unconditional), noise - final


@pytest.mark.parametrize(
    "num_updates, scale, settings",
    [
        pytest.param(1, 2.0, {}, marks=pytest.mark.slow),
        (2, 2.0, {}),
        (1, 1.0, {"anchor_cfg_scale": 3.0, "lora_rank": 2, "ema_decay": 0.5}),
        pytest.param(2, 1.0, {"anchor_cfg_scale": 3.0}, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_equals_the_equation(tiny_config, mesh, num_updates, scale, settings):
    """The loss is r |v - t|^2 + (1 - r) |2 v_old - v - t|^2 + 0.3 (0.7 |v - v_anchor|^2 + 0.4 |v -
    v_old|^2).

    The old velocities are computed before the first update; in iteration 1 the anchor has the same
    weights, and by default the same guidance. One rollout has no reward.
    """
    settings = settings | {
        "num_updates_per_rollout": num_updates,
        "cfg_scale": scale,
        "learning_rate": 1e-3,
    }
    config = tiny_config.with_settings(**EQUATION | settings)
    trainer = Trainer(config, mesh, CPU)
    rollouts, parameters = sample_rollouts(trainer), trainer.run.policy.parameters
    # 3 is clipped
    rollouts.advantages[:] = torch.tensor([1.5, -0.5, 3.0, torch.nan, 0.3, -2.0, 0.0, 0.9])
    weights = [1.75 / 2, 0.75 / 2, 1.0, None, 1.15 / 2, 0.0, 1 / 2, 1.45 / 2]
    with torch.no_grad():
        old = [velocities_and_targets(trainer, rollouts, column, scale)[0] for column in range(2)]
        of_anchor = settings.get("anchor_cfg_scale", scale)
        anchor = [
            velocities_and_targets(trainer, rollouts, column, of_anchor)[0] for column in range(2)
        ]

    def equation(weights, rows):
        losses = []
        for column in range(2):
            v, t = velocities_and_targets(trainer, rollouts, column, scale)
            for row in {*rows} - {3}:
                policy = (
                    weights[row] * (v - t)[row] ** 2
                    + (1 - weights[row]) * (2 * old[column] - v - t)[row] ** 2
                )
                kl = 0.7 * (v - anchor[column])[row] ** 2 + 0.4 * (v - old[column])[row] ** 2
                losses.append((policy + 0.3 * kl).mean())
        gradients = torch.autograd.grad(torch.stack(losses).mean(), parameters, allow_unused=True)
        return torch.cat(
            [
                torch.zeros(p.numel()) if g is None else g.flatten()
                for p, g in zip(parameters, gradients)
            ]
        )

    found, step = [], trainer.run.policy.optimizers.step
    # group 1 first in iteration 1
    rows_of_updates = [range(8)] if num_updates == 1 else [range(4, 8), range(4)]

    def compare_and_step(rate):
        applied = torch.cat([p.grad.flatten() for p in parameters])
        expected = equation(weights, rows_of_updates[len(found)])
        assert (applied - expected).norm() < 1e-4 * expected.norm()
        found.append(applied)
        step(rate)

    kl_alone = equation([0.5] * 8, rows_of_updates[0])  # with r = 1/2 the branches cancel
    mirrored = equation([w if w is None else 1 - w for w in weights], rows_of_updates[0])
    trainer.run.policy.optimizers.step = compare_and_step
    trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    assert len(found) == num_updates
    largest = found[0].abs().max().item()
    torch.testing.assert_close(
        mirrored - kl_alone, kl_alone - found[0], rtol=1e-3, atol=1e-4 * largest
    )
    assert (kl_alone.abs().max() > 0.01 * largest) == ("anchor_cfg_scale" in settings)


def change_the_policy(trainer, reference):
    with torch.no_grad():
        for parameter in trainer.run.policy.parameters:
            parameter.mul_(1.05)


def change_the_old_policy(trainer, reference):
    reference.checked.update((row, velocity * 1.1) for row, velocity in reference.checked.items())


def change_inputs(trainer, change):
    nft_terms = trainer.run.objective.nft_terms
    trainer.run.objective.nft_terms = lambda inputs, *coefficient: nft_terms(
        change(inputs), *coefficient
    )


def use_the_policy_in_the_mirrored_branch(trainer, reference):
    # 2 v - v is v
    change_inputs(trainer, lambda inputs: replace(inputs, old_velocity=inputs.velocity))


def ignore_the_advantages(trainer, reference):
    change_inputs(
        trainer, lambda inputs: replace(inputs, advantages=torch.ones_like(inputs.advantages))
    )


@pytest.mark.parametrize(
    "fault, message",
    [
        (change_the_policy, "first step and its replay"),
        (change_the_old_policy, "distance to the old policy"),
        (use_the_policy_in_the_mirrored_branch, "gradient of the worst"),
        (ignore_the_advantages, "gradient of the worst"),
    ],
)
def test_a_fault_stops_the_run_before_the_first_update(trainer, fault, message):
    rollouts = sample_rollouts(trainer)
    anchor = trainer.run.objective.prepare(rollouts)
    fault(trainer, anchor)
    before = [parameter.clone() for parameter in trainer.run.policy.parameters]
    with pytest.raises(OffPolicyError, match=message):
        trainer.run.update(rollouts, anchor, 1)
    assert all(map(torch.equal, before, trainer.run.policy.parameters))


def test_noise_levels_in_the_wrong_unit_stop_the_run(trainer, monkeypatch):
    """Timesteps from 0 to 1 for a transformer that expects 0 to 1000."""
    rollouts = sample_rollouts(trainer)
    velocity = trainer.run.pipeline.velocity

    def unscaled(latents, timestep, conditions, **ends):
        return velocity(latents, timestep / 1000, conditions, **ends)

    monkeypatch.setattr(trainer.run.pipeline, "velocity", unscaled)
    anchor = trainer.run.objective.prepare(rollouts)
    with pytest.raises(OffPolicyError, match="relative to that of a zero velocity"):
        trainer.run.update(rollouts, anchor, 1)


def test_an_untrained_model_passes_the_check_only_with_random_weights(trainer):
    config = trainer.config.with_settings(random_weights=True)
    trainer = Trainer(config, trainer.mesh, CPU)
    rollouts = sample_rollouts(trainer)
    # as if the weights were those of a file
    trainer.run.objective.config = config.with_settings(random_weights=False)
    with pytest.raises(
        OffPolicyError, match="that of a zero velocity, is 1.*, above 1; .* set random_weights or"
    ):
        trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    trainer.run.objective.config = config
    assert trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)["grad/norm"] > 0
    rollouts = sample_rollouts(trainer)
    change_the_policy(trainer, None)  # the other checks remain
    with pytest.raises(OffPolicyError, match="first step and its replay"):
        trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 2)


def test_an_old_policy_that_follows_the_policy_stops_the_run_at_the_second_update(trainer):
    rollouts = sample_rollouts(trainer)
    anchor = trainer.run.objective.prepare(rollouts)
    anchor.old.clear()  # so that each pass uses the policy's own velocity
    with pytest.raises(OffPolicyError, match="still equals the policy"):
        trainer.run.update(rollouts, anchor, 1)
    assert trainer.run.update.update_count == 1  # the second update is not applied


@pytest.mark.system
def test_a_control_run_drops_the_rewards_and_follows_the_guided_anchor(trainer):
    """The gradient is 2 w |v - v_anchor| as in the equation with advantage 0; a rollout without
    reward stays out.
    """
    changes = {
        "ignore_rewards": True,
        "kl_strategy": "fixed",
        "anchor_cfg_scale": 3.0,
        "num_updates_per_rollout": 1,
    }
    trainer = Trainer(trainer.config.with_settings(**changes), trainer.mesh, CPU)
    trainer.run.rewards.wait = lambda pending: {
        row: Reward(float(row) if row else float("nan"), {}) for row in range(8)
    }
    rollouts = sample_rollouts(trainer)
    assert (
        rollouts.advantages.isnan().tolist() == [True] + 7 * [False]
        and not rollouts.advantages[1:].any()
    )
    metrics = trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    assert metrics["kl/position"] > 0 and metrics["grad/norm"] > 0
    changes = {"anchor_cfg_scale": None}
    trainer = Trainer(trainer.config.with_settings(**changes), trainer.mesh, CPU)
    rollouts = sample_rollouts(trainer)
    metrics = trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    assert metrics["grad/norm"] == metrics["kl/position"] == 0  # nothing is left to train on


@pytest.mark.parametrize(
    "dtype, distance, stops", [("bf16", 4e-2, False), ("bf16", 6e-2, True), ("fp32", 4e-2, True)]
)
def test_only_a_distance_above_the_rounding_of_the_dtype_stops_the_run(
    trainer, dtype, distance, stops
):
    rollouts = sample_rollouts(trainer)
    trainer.run.objective.config = trainer.config.with_settings(
        dtype=dtype, batched_forward="false"
    )
    deviations = [torch.tensor(distance), torch.tensor(0.0)]
    error = pytest.raises(
        OffPolicyError, match="distance to the old policy before any update is 0.0"
    )
    with error if stops else nullcontext():
        trainer.run.objective.check_fresh(rollouts, Velocities(), [Pass([0], 0)], [], deviations, 1)


def test_a_replica_without_scored_rollouts_does_not_fail_the_check_because_of_nan(trainer):
    rollouts = sample_rollouts(trainer)
    reference = trainer.run.objective.prepare(rollouts)
    rollouts.trajectories.latents.fill_(torch.nan)
    trainer.run.objective.check_fresh(rollouts, reference, [Pass([], 0)], [], [torch.zeros(())], 1)
    with pytest.raises(OffPolicyError, match="nan"):
        trainer.run.objective.check_fresh(
            rollouts, reference, [Pass([0], 0)], [], [torch.zeros(())], 1
        )


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time/", "memory/", "perf/"))
        }
        for line in lines
    ]


@pytest.mark.system
def test_a_resumed_run_equals_the_uninterrupted_run(tiny_config, mesh, tmp_path):
    """The run has a LoRA, an EMA and an anchor, and resumes between two refreshes of the anchor."""
    settings = NFT | {
        "lora_rank": 2,
        "ema_decay": 0.5,
        "learning_rate": 1e-3,
        "update_ref_model_step": 4,
    }
    config = tiny_config.with_settings(**settings, max_steps=2, save_interval=1)
    uninterrupted = Trainer(config, mesh, CPU)
    uninterrupted.train()
    interrupted = config.with_settings(output_dir=str(tmp_path / "interrupted"))
    Trainer(interrupted.with_settings(max_steps=1), mesh, CPU).train()
    resumed = Trainer(interrupted.with_settings(resume_from_checkpoint="latest"), mesh, CPU)
    assert resumed.iteration == 1 and resumed.run.policy.anchor.age == 2
    resumed.train()
    expected = read_metrics(tmp_path / "run")
    assert read_metrics(tmp_path / "interrupted") == expected and expected[1]["kl/position"] > 0
    found = resumed.run.policy.tensors()
    for name, tensor in uninterrupted.run.policy.tensors().items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("name, scale", [("miniature_nft", 1), ("miniature_guidance", 3)])
def test_the_shipped_configs_use_objective_nft_and_one_has_a_guided_anchor(name, scale):
    config = load_config(f"configs/{name}.yaml")
    assert (config.objective.name, config.rollout.eta, config.anchor_cfg_scale) == ("nft", 0, scale)
