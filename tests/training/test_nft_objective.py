"""Training with objective nft, and its checks of the old policy."""

import re
from dataclasses import replace

import pytest
import torch

from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from hyvideo.training.objectives.nft import Velocities
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.rollout_batch import Pass
from tests.shallow import write_trained
from tests.training.test_policy_update import BOTH_KL_TERMS

CPU = torch.device("cpu")
NFT = {
    "objective": "nft",
    "nft_levels": 2,
    "eta": 0.0,
    "random_weights": False,
    "num_updates_per_rollout": 2,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("shallow") / "ckpts")


@pytest.fixture
def tiny_config(tiny_config, root):
    return tiny_config.with_settings(pretrained_model_root=root)


@pytest.fixture
def nft_config(tiny_config, tmp_path):
    settings = NFT | {
        "output_dir": str(tmp_path),
        "learning_rate": 1e-3,
        "update_ref_model_step": 2,
    }
    return tiny_config.with_settings(**settings)


@pytest.fixture
def trainer(nft_config, mesh):
    return Trainer(nft_config, mesh, CPU)


def sample_rollouts(trainer):
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
    rewards = trainer.run.rewards.wait(pending)
    return rollouts.with_rewards(
        rewards, trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    )


def test_each_rollout_has_separate_noise_levels_that_cover_the_range(trainer):
    levels = trainer.run.source.noise.levels(1, trainer.run.source.choose(1).indices, 4, shift=1.0)
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
    nft_config, mesh
):
    config = nft_config.with_settings(cfg_scale=2.0, guidance_interval="0.5:1")
    trainer = Trainer(config, mesh, CPU)
    rollouts = sample_rollouts(trainer)
    levels = rollouts.trained_steps
    assert levels.shape == (8, 2) and torch.equal(levels, levels[:1].expand_as(levels))
    trainer.run.objective.cost.forwards = 0
    trainer.run.objective.prepare(rollouts)
    branches = 1 + (levels[0] >= 0.5).int()
    # four rows of the second update, and one row
    assert trainer.run.objective.cost.forwards == 4 * branches.sum() + branches[0]


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
    """Compute the guided velocity of every re-noised rollout and its target, as docs/methods.md
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
    [(2, 2.0, {}), (1, 1.0, {"anchor_cfg_scale": 3.0, "lora_rank": 2, "ema_decay": 0.5})],
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


def change_inputs(trainer, change):
    nft_terms = trainer.run.objective.nft_terms
    trainer.run.objective.nft_terms = lambda inputs, *coefficient: nft_terms(
        change(inputs), *coefficient
    )


def use_the_policy_in_the_mirrored_branch(trainer, reference):
    # 2 v - v is v
    change_inputs(trainer, lambda inputs: replace(inputs, old_velocity=inputs.velocity))


@pytest.mark.parametrize(
    "fault, message",
    [
        (change_the_policy, "first step and its replay"),
        (use_the_policy_in_the_mirrored_branch, "gradient of the worst"),
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
    with pytest.raises(OffPolicyError, match="relative to that of a zero velocity") as error:
        trainer.run.update(rollouts, anchor, 1)
    sigma = re.search(r"measured at sigma ([\d.]+);", str(error.value)).group(1)
    noisiest = [f"{level:.3g}" for level in rollouts.trained_steps.amax(1).tolist()]
    assert sigma in noisiest


def test_an_untrained_model_passes_the_check_only_with_random_weights(nft_config, mesh):
    config = nft_config.with_settings(random_weights=True)
    trainer = Trainer(config, mesh, CPU)
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


def test_only_a_distance_above_the_rounding_of_the_dtype_stops_the_run(trainer):
    rollouts = sample_rollouts(trainer)
    objective = trainer.run.objective

    def check(dtype, distance):
        objective.config = trainer.config.with_settings(dtype=dtype, batched_forward="false")
        deviations = [torch.tensor(distance), torch.tensor(0.0)]
        objective.check_fresh(rollouts, Velocities(), [Pass([0], 0)], [], deviations, 1)

    check("bf16", 4e-2)
    for dtype, distance in (("bf16", 6e-2), ("fp32", 4e-2)):
        with pytest.raises(
            OffPolicyError, match="distance to the old policy before any update is 0.0"
        ):
            check(dtype, distance)
