"""Tests of the trust region: both KL terms and schedules of the coefficient computed by hand."""

import math

import pytest
import torch

from hyvideo.loss.trust_region import (
    KLCoefficient,
    KLScheduleSettings,
    position_kl,
    velocity_kl,
)
from hyvideo.schedulers.schedule import Schedule

LATENT = (2, 4, 3, 6, 8)


@pytest.fixture
def latent():
    generator = torch.Generator().manual_seed(0)
    return lambda shape=LATENT: torch.randn(shape, generator=generator)


# --- KL terms ----------------------------------------------------------------------------------


def test_position_kl_is_the_kl_of_two_gaussians_of_equal_variance(latent):
    mean, anchor, std = latent(), latent(), torch.tensor([0.5, 1.2]).view(2, 1, 1, 1, 1)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, std), normal(anchor, std)).mean(
        dim=(1, 2, 3, 4)
    )
    torch.testing.assert_close(position_kl(mean, anchor, std), expected, rtol=1e-5, atol=0)


def test_position_kl_is_bounded_for_small_variances():
    one = torch.ones(1, 1, 1, 1, 1)
    assert position_kl(2 * one, one, 1e-3 * one).item() == pytest.approx(1 / 3e-6)
    assert position_kl(2 * one, one, 0 * one).item() == pytest.approx(1e6)


def test_position_kl_and_its_gradient_are_exactly_0_at_the_anchor(latent):
    anchor = latent()
    mean = anchor.clone().requires_grad_()
    distance = position_kl(mean, anchor, torch.full((2, 1, 1, 1, 1), 0.08))
    (gradient,) = torch.autograd.grad(distance.sum(), mean)
    assert torch.equal(distance, torch.zeros(2)) and torch.equal(gradient, torch.zeros(LATENT))


def test_velocity_kl_is_the_rollout_log_prob_minus_the_new_one():
    distance = velocity_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -2.25]))
    torch.testing.assert_close(distance, torch.tensor([0.5, -0.25]))


def test_velocity_kl_under_cps_is_2_std_squared_times_the_kl(latent):
    """The factor is exact for outcomes in pairs around the rollout's mean.

    The numbers equal those in docs/sde.md.
    """
    schedule = Schedule.build("cps", num_steps=20, shift=5.0, eta=0.5)
    parts = []
    for index in schedule.stochastic_steps:
        sample, velocity, moved, noise = (latent() for _ in range(4))
        distances = []
        for sign in (1, -1):
            old = schedule.step(velocity, sample, index, sign * noise)
            new = schedule.replay(moved, sample, [index] * len(sample), old.sample)
            distances.append(velocity_kl(new.log_prob, old.log_prob))
        kl = position_kl(new.mean, old.mean, old.std)
        parts.append((sum(distances) / 2 / kl).mean().item())
    expected = [2 * std**2 for std in (step.std for step in schedule.transitions[:-1])]
    assert parts == pytest.approx(expected, rel=1e-3)
    assert (round(parts[0], 2), round(parts[-1], 2)) == (0.98, 0.04)


# --- coefficient -------------------------------------------------------------------------------


def coefficient(**changes):
    defaults = dict(minimum=1.0, maximum=9.0, warmup_updates=4, window=2, gain=0.1, target=2.0)
    return KLCoefficient(KLScheduleSettings(**{**defaults, **changes}))


def values(beta, kls):
    """Return the coefficient after each observed KL."""
    seen = []
    for kl in kls:
        beta.observe(kl)
        seen.append(beta.value)
    return seen


def test_constant_stays_at_the_maximum():
    beta = coefficient(schedule="constant")
    assert beta.value == 9
    assert values(beta, [0.0, 100.0, 2.0, 2.0, 50.0]) == [9] * 5


def test_two_stage_rises_linearly_and_then_stays_constant():
    beta = coefficient(schedule="two_stage")
    assert beta.value == 1
    assert values(beta, [100.0] * 6) == pytest.approx([3, 5, 7, 9, 9, 9])


@pytest.mark.parametrize("schedule", ["two_stage", "adaptive"])
@pytest.mark.parametrize("warmup", [0.4, 2.5])
def test_a_warm_up_of_any_length_rises_linearly_to_the_maximum_and_not_above(schedule, warmup):
    """With the conventions of the reference, the warm-up is a fraction: a number of pairs divided
    by those per update.

    The KL equals the target, so that an adaptive coefficient stays where the warm-up ends.
    """
    beta = coefficient(schedule=schedule, warmup_updates=warmup)
    expected = [1 + 8 * min(1.0, number / warmup) for number in range(1, 6)]
    seen = values(beta, [2.0] * 5)
    assert seen == pytest.approx(expected)
    assert max(seen) == 9


def test_adaptive_follows_the_mean_of_the_window_by_hand():
    """m = 2, 3, 5, 4.5 over the last two; e = (m - 2) / 2; beta <- beta (1 - 0.1 e)."""
    beta = coefficient(schedule="adaptive")
    seen = values(beta, [9.0, 9.0, 9.0, 2.0, 2.0, 4.0, 6.0, 3.0])
    expected = [3, 5, 7, 9, 9, 9 * 0.95, 9 * 0.95 * 0.85, 9 * 0.95 * 0.85 * 0.875]
    assert seen == pytest.approx(expected)


def test_one_update_changes_beta_by_at_most_a_factor_of_2():
    for kl, expected in [(1e6, 2.0), (0.0, 8.0)]:
        beta = coefficient(warmup_updates=0, gain=5.0)
        beta.value = 4.0
        assert values(beta, [kl]) == pytest.approx([expected])


@pytest.mark.parametrize("kl, bound", [(1e6, 1.0), (0.0, 9.0)])
def test_beta_stays_within_its_bounds(kl, bound):
    assert values(coefficient(gain=5.0), [kl] * 12)[-1] == bound


def test_a_kl_that_is_not_finite_counts_as_an_update_but_is_not_averaged():
    beta = coefficient(warmup_updates=1)
    assert values(beta, [2.0, math.nan, math.inf, 4.0]) == pytest.approx([9, 9, 9, 9 * 0.95])
    assert beta.num_updates == 4


def test_a_resumed_coefficient_equals_an_uninterrupted_one():
    kls = [9.0, 1.0, 3.0, 2.5, 7.0, 0.5, 4.0, 6.0, 3.0]
    whole = values(coefficient(), kls)
    for stop in range(len(kls)):
        first, second = coefficient(), coefficient()
        values(first, kls[:stop])
        second.load_state_dict(first.state_dict())
        assert values(second, kls[stop:]) == whole[stop:]
        assert second.state_dict()["recent"] == kls[-2:]


def test_changed_settings_apply_to_a_resumed_coefficient_at_once():
    """With allow_changed_settings, the next update must not use a coefficient outside the new
    bounds.
    """
    old = coefficient()
    values(old, [4.0] * 6)
    assert old.value == pytest.approx(9 * 0.9**2)
    for changes, expected in (
        ({}, old.value),
        ({"maximum": 3.0}, 3.0),
        ({"minimum": 8.0}, 8.0),
        ({"schedule": "constant", "maximum": 30.0}, 30.0),
        ({"schedule": "two_stage"}, 9.0),
        ({"warmup_updates": 12}, 1 + 8 * 6 / 12),
        ({"warmup_updates": 12, "maximum": 3.0}, 1 + 2 * 6 / 12),
    ):
        new = coefficient(**changes)
        new.load_state_dict(old.state_dict())
        assert new.value == pytest.approx(expected), changes
