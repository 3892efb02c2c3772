"""The gradient of an update against the equations, its cost, and the input of the KL
coefficient.
"""

import math
from dataclasses import replace

import pytest
import torch

from hyvideo.schedulers.transitions import shifted_levels
from hyvideo.trainer import Trainer
from hyvideo.training.iteration import sample
from tests.test_trainer import CPU, Redness, run

BOTH_KL_TERMS = {
    "kl_strategy": "dual_fixed",
    "kl_weight": 0.3,
    "kl_schedule": "constant",
    "dual_kl_moving_weight": 0.7,
    "dual_kl_step_weight": 0.4,
}
# Guidance, permuted steps, two mini-batches, two batches of rollouts, both KL terms.
SETTINGS = BOTH_KL_TERMS | {
    "cfg_scale": 2.0,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "mini_batch_size_per_update": 2,
    "grpo_sampling_steps": 4,
    "eta": 0.7,
    "max_grad_norm": 1e9,
    "gate_interval": 0,
}


@pytest.fixture
def tiny_config(tiny_config):
    return tiny_config.with_settings(grpo_sampling_steps=3)


@torch.no_grad()
def move(policy, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters:
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def log_prob_and_mean(trainer, rollouts, row, step, scale=2.0):
    """Compute the transition of docs/sde.md in the order of the page, with SAGE's variance from
    Python floats.
    """
    pipeline, rollout = trainer.run.pipeline, trainer.config.rollout
    levels = shifted_levels(rollout.grpo_sampling_steps, rollout.shift)
    sigma, sigma_next = levels[step], levels[step + 1]
    conditions = rollouts.conditions.select([row])
    x, x_next = (rollouts.trajectories.latents[[row], step + i] for i in (0, 1))
    conditional = pipeline._forward(x, [(1000.0 * sigma, None)], conditions)
    unconditional = pipeline._forward(
        x, [(1000.0 * sigma, None)], conditions.with_text_of(pipeline.negative)
    )
    v = unconditional + scale * (conditional - unconditional)
    d = sigma - sigma_next
    variance = rollout.eta**2 * (
        torch.log(torch.tensor((1 - sigma_next) / (1 - min(sigma, 0.997)))).double() - d
    )
    score = -(x + (1 - sigma) * v) / sigma
    mean = x - d * v + variance.float() / 2 * score
    log_prob = (
        -((x_next - mean) ** 2) / (2 * variance)
        - variance.sqrt().log()
        - torch.tensor(2 * torch.pi).sqrt().log()
    ).mean()
    return log_prob, mean, variance.item()


def equalizer_weights(trainer, variances):
    """Compute the median of the gradient norms |d mean / d v| / std of the first steps, divided by
    that of each.
    """
    levels = shifted_levels(
        trainer.config.rollout.grpo_sampling_steps, trainer.config.rollout.shift
    )
    norms = []
    for sigma, sigma_next, variance in zip(levels, levels[1:], variances):
        norms.append((sigma - sigma_next + variance / 2 * (1 - sigma) / sigma) / variance**0.5)
    return [sorted(norms)[(len(norms) - 1) // 2] / norm for norm in norms]


@pytest.mark.parametrize(
    "kl_velocity, is_balanced, of_anchor",
    [
        ("log_ratio", True, None),
        ("gaussian", False, None),
        pytest.param("gaussian", True, 3.0, marks=pytest.mark.system),
    ],
)
def test_the_gradient_equals_the_equations(tiny_config, mesh, kl_velocity, is_balanced, of_anchor):
    settings = {
        "clip_range": 2e-3,
        "kl_velocity": kl_velocity,
        "use_grad_balancing": is_balanced,
        "anchor_cfg_scale": of_anchor,
    }
    config = tiny_config.with_settings(**SETTINGS, **settings)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
    rewards = trainer.run.rewards.wait(pending)
    advantages = torch.tensor([1.5, -0.4, 0.7, -1.1])
    rollouts = rollouts.with_rewards(rewards, advantages)
    orders = rollouts.trained_steps.tolist()
    assert len({tuple(order) for order in orders}) > 1 and all(
        sorted(order) == [0, 1, 2] for order in orders
    )

    with trainer.run.policy.anchor.swapped_in(), torch.no_grad():
        move(trainer.run.policy, 5e-3, seed=2)  # an anchor that differs from the rollout policy
        scale = of_anchor or 2.0
        anchors = [
            [log_prob_and_mean(trainer, rollouts, row, step, scale)[1] for step in range(3)]
            for row in range(4)
        ]
    move(trainer.run.policy, 1e-2, seed=1)  # ratios leave 1, some beyond the clip range
    trainer.run.policy.anchor.age += 1
    variances = [log_prob_and_mean(trainer, rollouts, 0, step)[2] for step in range(3)]
    terms, is_clipped = [], []
    weights = equalizer_weights(trainer, variances) if is_balanced else [1.0] * 3
    assert max(weights) > 1.5 * min(weights) or not is_balanced
    for row in range(4):
        for step in range(3):
            log_prob, mean, variance = log_prob_and_mean(trainer, rollouts, row, step)
            ratio = (log_prob - rollouts.trajectories.log_probs[row, step]).exp()
            clamped = ratio.clamp(1 - 2e-3, 1 + 2e-3)
            is_clipped.append((ratio != clamped).item())
            policy = weights[step] * torch.maximum(
                -advantages[row] * ratio, -advantages[row] * clamped
            )
            position = ((mean - anchors[row][step]) ** 2 / (2 * variance + 1e-6)).mean()
            velocity = rollouts.trajectories.log_probs[row, step] - log_prob
            if kl_velocity == "gaussian":
                drawn = rollouts.trajectories.means[row, orders[row].index(step)]
                velocity = ((mean - drawn) ** 2 / (2 * variance + 1e-6)).mean()
            terms.append(policy + 0.3 * (0.7 * position + 0.4 * velocity))
    assert 0 < sum(is_clipped) < len(is_clipped)
    expected = torch.autograd.grad(
        torch.stack(terms).mean(), trainer.run.policy.parameters, allow_unused=True
    )

    applied = []
    trainer.run.policy.optimizers.step = lambda rate: applied.extend(
        p.grad.clone() for p in trainer.run.policy.parameters
    )
    metrics = trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    expected = [
        torch.zeros_like(p) if g is None else g
        for g, p in zip(expected, trainer.run.policy.parameters)
    ]
    flat, expected_flat = (
        torch.cat([g.flatten().double() for g in gs]) for gs in (applied, expected)
    )
    assert (flat - expected_flat).norm() < 1e-4 * expected_flat.norm()
    assert metrics["grad/norm"] == pytest.approx(expected_flat.norm().item(), rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(torch.stack(terms).mean().item(), rel=1e-4)


def test_an_update_with_nan_or_inf_has_no_effect_on_the_next_one(tiny_config, mesh):
    """A sum of the loss may be infinite while the gradient is finite, if a detached factor is 0 /
    0.
    """
    config = tiny_config.with_settings(max_bad_updates=9)

    def step(trainer, *, in_gradient=0.0, in_loss=0.0):
        for parameter in trainer.run.policy.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        trainer.run.policy.parameters[3].grad.view(-1)[0] += in_gradient
        losses = torch.tensor([1.0, 1.0 + in_loss])  # of two ranks
        return trainer.run.update._step(1e-2, losses, iteration=1)

    plain, interrupted = (Trainer(config, mesh, CPU, scorers={"test": Redness()}) for _ in range(2))
    before = [parameter.detach().clone() for parameter in plain.run.policy.parameters]
    for bad in (math.nan, math.inf, -math.inf):
        for places in (
            {"in_gradient": bad},
            {"in_loss": bad},
            {"in_gradient": bad, "in_loss": bad},
        ):
            interrupted.run.update.nonfinite.record_finite()
            assert step(interrupted, **places) is None, places
            assert all(
                torch.equal(old, new) for old, new in zip(before, interrupted.run.policy.parameters)
            ), places
            assert all(parameter.grad is None for parameter in interrupted.run.policy.parameters), (
                places
            )
    assert step(interrupted) == step(plain) > 0
    assert interrupted.run.update.update_count == plain.run.update.update_count == 1
    for old, expected, found in zip(
        before, plain.run.policy.parameters, interrupted.run.policy.parameters
    ):
        assert torch.equal(found, expected) and not torch.equal(found, old)


def gradient_and_position(trainer, rollouts, columns):
    """Return the gradient of an update that measures the position KL at these columns, and its
    position KL.
    """
    applied = []
    trainer.run.policy.optimizers.step = lambda rate: applied.extend(
        p.grad.clone() for p in trainer.run.policy.parameters
    )
    rollouts = replace(rollouts, anchor_columns=columns)
    metrics = trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    trainer.run.policy.optimizers.zero_grad()
    return torch.cat([gradient.flatten().double() for gradient in applied]), metrics["kl/position"]


@pytest.mark.parametrize("kl_velocity", ["log_ratio", "gaussian"])
def test_the_kl_of_a_step_to_a_low_level_has_its_own_std(tiny_config, mesh, kl_velocity):
    """The last noisy step of cps ends at 0.005, where the std is 80 times that of half the step."""
    changes = {
        "sde_type": "cps",
        "sigmas": "1,0.8,0.005",
        "grpo_sampling_steps": 3,
        "enable_timestep_permutation": False,
        "kl_velocity": kl_velocity,
    }
    trainer = Trainer(
        tiny_config.with_settings(**SETTINGS | changes), mesh, CPU, scorers={"test": Redness()}
    )
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
    rewards = trainer.run.rewards.wait(pending)
    advantages = trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    rollouts = rollouts.with_rewards(rewards, advantages)
    move(trainer.run.policy, 1e-3, seed=1)
    trainer.run.policy.anchor.age += 1
    low = rollouts.schedule.transitions[1]
    assert low.kl_std == pytest.approx(low.std * 0.795 / 0.01)
    without = replace(low, kl_std=None)
    first, _, last = rollouts.schedule.transitions
    unbounded = replace(rollouts.schedule, transitions=(first, without, last))
    _, position = gradient_and_position(trainer, rollouts, [1])
    _, larger = gradient_and_position(trainer, replace(rollouts, schedule=unbounded), [1])
    ratio = (2 * low.kl_std**2 + 1e-6) / (2 * low.std**2 + 1e-6)
    assert ratio > 1000 and larger / position == pytest.approx(ratio, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        # one update per iteration, since the test skips the optimizer step
        pytest.param({"objective": "nft", "nft_levels": 3}, marks=pytest.mark.slow),
    ],
)
def test_the_position_kl_at_drawn_steps_is_unbiased(tiny_config, mesh, settings):
    """The mean over the three equally likely draws of one step equals the result with all three
    steps.
    """
    config = tiny_config.with_settings(
        **SETTINGS | {"kl_weight": 3e3, "anchor_fraction": 0.34} | settings
    )
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
    assert len(rollouts.anchor_columns) == 1
    rewards = trainer.run.rewards.wait(pending)
    rollouts = rollouts.with_rewards(
        rewards, trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    )
    with trainer.run.policy.anchor.swapped_in():
        move(trainer.run.policy, 5e-3, seed=2)
    trainer.run.policy.anchor.age += 1
    full, distance = gradient_and_position(trainer, rollouts, [0, 1, 2])
    parts, distances = zip(
        *(gradient_and_position(trainer, rollouts, [column]) for column in range(3))
    )
    assert distance > 0 and sum(distances) / 3 == pytest.approx(distance, rel=1e-5)
    assert (sum(parts) / 3 - full).norm() < 1e-5 * full.norm()
    # no single draw gives the full gradient
    assert min((part - full).norm() for part in parts) > 1e-2 * full.norm()


@pytest.mark.parametrize(
    "settings, before, after",
    [({}, True, False), ({"kl_velocity": "gaussian"}, True, True)],
)
def test_means_are_stored_only_if_the_updates_need_them(tiny_config, mesh, settings, before, after):
    config = tiny_config.with_settings(timestep_fraction=0.5, grpo_sampling_steps=3, **settings)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    stored, anchor_means = [], trainer.run.objective.prepare
    trainer.run.objective.prepare = lambda drawn: (
        stored.append(drawn.trajectories.means),
        anchor_means(drawn),
    )[1]
    for trainer.iteration in (1, 2):
        trainer.run_iteration()
    assert [means is not None for means in stored] == [before, after]
    assert all(means.shape[:2] == (8, 1) for means in stored if means is not None)


def test_the_coefficient_follows_both_kl_terms_with_their_weights(tiny_config, mesh):
    config = tiny_config.with_settings(
        kl_strategy="dual_fixed",
        kl_velocity="log_ratio",
        dual_kl_moving_weight=0.7,
        dual_kl_step_weight=5.0,
        num_updates_per_rollout=2,
        kl_warmup_updates=1,
        learning_rate=1e-2,
    )
    history, trainer = run(config, mesh, iterations=3)
    recent = list(trainer.run.update.kl_coefficient.recent)
    for index, line in enumerate(history):  # both updates of an iteration have equally many terms
        observed = (recent[2 * index] + recent[2 * index + 1]) / 2
        assert observed == pytest.approx(
            0.7 * line["kl/position"] + 5.0 * line["kl/velocity"], rel=1e-6
        )
    assert abs(5.0 * history[-1]["kl/velocity"]) > 1e-3 * history[-1]["kl/position"]


def test_both_warm_ups_count_updates(tiny_config, mesh):
    """With two updates per iteration, that of the learning rate in updates, and that of the KL
    coefficient in the updates of `Config.kl_warmup`.
    """
    config = tiny_config.with_settings(
        num_updates_per_rollout=2,
        warmup_steps=4,
        reference_conventions=True,
        timestep_fraction=1.0,
        kl_schedule="two_stage",
        kl_weight=0.4,
        kl_warmup_updates=60,
    )
    assert config.kl_warmup == 5
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    update, optimizers = trainer.run.update, trainer.run.policy.optimizers
    step, rates, coefficients = optimizers.step, [], []

    def recorded(rate):
        step(rate)
        rates.append(optimizers.optimizers[0].param_groups[0]["lr"])
        coefficients.append(update.kl_coefficient.value)

    optimizers.step = recorded
    for trainer.iteration in (1, 2, 3):
        trainer.run_iteration()
    rate = config.optimizer.learning_rate
    assert rates == pytest.approx([rate / 4, rate / 2, 3 * rate / 4, rate, rate, rate])
    assert coefficients == pytest.approx([0, 0.08, 0.16, 0.24, 0.32, 0.4], abs=1e-6)


def test_the_ema_follows_the_policy_with_its_decay(tiny_config, mesh):
    config = tiny_config.with_settings(ema_decay=0.9, learning_rate=1e-2)
    trainer = Trainer(config, mesh, CPU, scorers={"test": Redness()})
    start = {
        name: parameter.detach().clone() for name, parameter in trainer.run.policy.trained.items()
    }
    trainer.iteration = 1
    trainer.run_iteration()
    moved = 0.0
    for name, average in trainer.run.policy.ema.tensors().items():
        policy = trainer.run.policy.trained[name].detach()
        torch.testing.assert_close(average, 0.9 * start[name] + 0.1 * policy)
        moved += (policy - start[name]).abs().sum().item()
    assert moved > 0


def test_the_last_step_of_cps_is_trained_by_its_kl_with_the_conventions_of_the_reference(
    tiny_config, mesh
):
    settings = SETTINGS | {
        "sde_type": "cps",
        "eta": 0.5,
        "last_step": "stochastic",
        "reference_conventions": True,
    }
    trainer = Trainer(tiny_config.with_settings(**settings), mesh, CPU, scorers={"test": Redness()})
    trainer.iteration = 1
    rollouts, pending = sample(trainer.run, 1)
    rewards = trainer.run.rewards.wait(pending)
    rollouts = rollouts.with_rewards(
        rewards, trainer.run.rewards.advantages(rollouts.indices, rewards)[0]
    )
    assert all(sorted(order) == [0, 1, 2, 3] for order in rollouts.trained_steps.tolist())
    column = rollouts.trained_steps[0].tolist().index(3)
    mean = rollouts.replay(trainer.run.pipeline, [0], torch.tensor([3])).mean.detach()
    reference = {each: mean + 0.1 for each in rollouts.columns}
    terms = trainer.run.objective.terms(rollouts, reference, [0], column, kl_coefficient=0.3)
    assert terms.metrics["kl/position"].item() == pytest.approx(0.1**2 / 2e-6, rel=1e-3)
    assert terms.deviation.item() == 0 and abs(terms.metrics["policy/log_prob"].item()) < 1e-9
    terms.loss.sum().backward()
    assert any(
        parameter.grad.abs().sum() > 0
        for parameter in trainer.run.policy.parameters
        if parameter.grad is not None
    )
    trainer.run.policy.optimizers.zero_grad()
    metrics = trainer.run.update(rollouts, trainer.run.objective.prepare(rollouts), 1)
    assert metrics["kl/position"] < 1e-6 and metrics["policy/ratio_max_deviation"] <= 1e-6
