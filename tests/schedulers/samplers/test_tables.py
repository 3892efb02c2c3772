"""Conformance of samplers: marginals and their rate, every step against torch, boundaries of all
schedules, tables.

Single transitions are tested in test_transitions.py and test_schedule.py.
"""

import itertools
import math

import pytest
import torch

from examples.sampler_figures import REGIMES, regime_stds
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAGE_SIGMA_MAX, SAMPLERS, schedule, shifted_levels
from tests.schedulers.expected import expected_of
from tests.schedulers.samplers import page
from tests.schedulers.samplers.marginals import (
    TWO_PEAKS,
    Mixture,
    interior_error,
    marginal_error,
)
from tests.schedulers.samplers.page import tables

ONE_PEAK = Mixture(means=(0.7,), std=0.4)
NUMBERS_OF_STEPS = range(4, 201)
SHIFTS = (1.0, 3.0, 5.0, 7.0, 9.0)


# --- marginals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [pytest.param(ONE_PEAK, marks=pytest.mark.slow), TWO_PEAKS], ids=["gaussian", "mixture"]
)
@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_marginals_are_correct_to_first_order_in_the_step(sde_type, data):
    """Twice the steps halve the distance, also for cps if eta decreases with the step width."""
    *_, eta_of_width = expected_of(sde_type).marginals.values()
    errors = [interior_error(sde_type, num_steps, eta_of_width, data) for num_steps in (16, 32, 64)]
    rates = [math.log2(error / half) for error, half in zip(errors, errors[1:])]
    assert errors[-1] < 0.015
    assert all(0.95 < rate < 1.2 for rate in rates), rates


@pytest.mark.parametrize("data", [ONE_PEAK, TWO_PEAKS], ids=["gaussian", "mixture"])
def test_cps_at_a_fixed_eta_does_not_converge_to_the_marginal(data):
    errors = [interior_error("cps", num_steps, lambda width: 0.5, data) for num_steps in (32, 64)]
    assert errors[1] > 0.7 * errors[0] and errors[1] > 0.02


def test_the_velocity_of_a_mixture_matches_its_score():
    """``score = -(x + (1 - sigma) v) / sigma``, with the score from autograd."""
    x = torch.linspace(-3, 3, 61, dtype=torch.float64, requires_grad=True)
    for sigma in (0.2, 0.6, 0.95):
        (score,) = torch.autograd.grad(TWO_PEAKS.density(x, sigma).log().sum(), x)
        expected = -(sigma * score + x) / (1 - sigma)
        torch.testing.assert_close(
            TWO_PEAKS.velocity(x, sigma), expected.detach(), rtol=1e-9, atol=1e-9
        )


def test_one_peak_is_propagated_as_the_normal_of_its_recursion():
    """One peak stays normal, and its mean and variance follow a recursion."""
    levels = shifted_levels(20, 5.0)[:-1]
    steps = schedule("sage_grpo", shifted_levels(20, 5.0), 0.5, "stochastic")[:-1]
    mean, variance = torch.tensor(0.0, dtype=torch.float64), 1.0
    for step, sigma in zip(steps, levels):
        at_0, at_1 = ONE_PEAK.velocity(torch.tensor([0.0, 1.0], dtype=torch.float64), sigma)
        slope = step.a + step.b * (at_1 - at_0)
        mean, variance = slope * mean + step.b * at_0, slope**2 * variance + step.std**2
    x = torch.arange(-5, 5, 0.01, dtype=torch.float64)
    density = torch.distributions.Normal(mean, variance**0.5).log_prob(x).exp()
    distance = 0.5 * 0.01 * (density - ONE_PEAK.density(x, levels[-1])).abs().sum().item()
    assert distance > 0.01
    assert marginal_error(steps, levels, ONE_PEAK) == pytest.approx(distance, rel=1e-3)


# --- every step against torch ------------------------------------------------------------------


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("shift", [1.0, 9.0])
@pytest.mark.parametrize("num_steps", [4, 200])
def test_log_prob_matches_torch_and_its_gradient_norm_matches_autograd(sde_type, shift, num_steps):
    """All steps of a schedule form one batch.

    With noise 1, each element of the sum has a gradient of exactly N_t.
    """
    made = Schedule.build(sde_type, num_steps=num_steps, shift=shift, eta=0.5)
    generator = torch.Generator().manual_seed(0)
    velocity, sample = (torch.randn(num_steps, 5, generator=generator) for _ in range(2))
    velocity.requires_grad_()
    steps = range(num_steps)
    drawn = [
        made.step(velocity[[i]], sample[[i]], i, torch.ones(1, 5)).sample.detach() for i in steps
    ]
    out = made.replay(velocity, sample, steps, torch.cat(drawn))
    is_stochastic = out.std.flatten() > 0
    mean, std = out.mean[is_stochastic], out.std[is_stochastic]
    expected = torch.distributions.Normal(mean, std).log_prob(out.sample[is_stochastic]).mean(1)
    if not SAMPLERS[sde_type].is_normalised:  # it drops terms without the mean
        expected = (
            2 * std.flatten() ** 2 * (expected + std.flatten().log() + 0.5 * math.log(2 * math.pi))
        )
    torch.testing.assert_close(out.log_prob[is_stochastic], expected, rtol=1e-4, atol=1e-6)
    assert (out.log_prob[~is_stochastic] == 0).all()

    (gradient,) = torch.autograd.grad(5 * out.log_prob.sum(), velocity)
    torch.testing.assert_close(
        gradient.abs(), made.log_prob_grad_norms[:, None].expand(-1, 5), rtol=2e-3, atol=1e-6
    )


@pytest.mark.parametrize("shift", [1.0, 5.0])
@pytest.mark.parametrize("num_steps", [4, 200])
def test_variances_of_sage_match_quadrature_up_to_the_clamp(num_steps, shift):
    """With ``s = 1 - exp(-u)``, which moves the pole to infinity,
    ``s / (1 - s) ds = (1 - exp(-u)) du``.

    The integral stops at the clamp, but the subtracted width extends to 1, which subtracts
    ``eta^2 (1 - clamp)`` more.
    """
    levels = shifted_levels(num_steps, shift)
    stds = [step.std for step in schedule("sage_grpo", levels, 0.7, "stochastic")]
    total = 0.0
    for std, sigma, sigma_next in zip(stds, levels, levels[1:]):
        top = min(sigma, SAGE_SIGMA_MAX)
        if sigma_next < top:
            u = torch.linspace(
                -math.log(1 - sigma_next), -math.log(1 - top), 2001, dtype=torch.float64
            )
            integral = 0.49 * (torch.trapezoid(1 - torch.exp(-u), u).item() - (sigma - top))
            assert std**2 == pytest.approx(integral, rel=1e-5)
            total += std**2
    if levels[1] < SAGE_SIGMA_MAX:  # then the total does not depend on the steps
        assert total == pytest.approx(0.49 * (-math.log(1 - SAGE_SIGMA_MAX) - 1), rel=1e-5)


# --- boundaries --------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_every_schedule_is_deterministic_only_at_expected_steps(sde_type):
    """Covers shifts 1 to 9 and 4 to 200 steps; a schedule that is not finite raises ValueError."""
    for shift, num_steps in itertools.product(SHIFTS, NUMBERS_OF_STEPS):
        levels = shifted_levels(num_steps, shift)
        stds = [step.std for step in schedule(sde_type, levels, 0.5, "stochastic")]
        expected = expected_of(sde_type).deterministic(levels)
        assert [place for place, std in enumerate(stds) if std == 0] == expected, (shift, num_steps)


@pytest.mark.parametrize("shift, fewest", [(3, 112), (5, 68), (7, 49), (9, 38)])
def test_the_first_step_of_sage_is_deterministic_from_a_number_of_steps(shift, fewest):
    for num_steps, is_stochastic in ((fewest - 1, True), (fewest, False)):
        first, *_ = schedule("sage_grpo", shifted_levels(num_steps, shift), 0.5, "stochastic")
        assert first.is_stochastic is is_stochastic


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_first_std_of_flow_is_eta_for_any_number_of_steps(shift):
    for num_steps in (4, 20, 200):
        first, *_ = schedule("flow_grpo", shifted_levels(num_steps, shift), 0.7, "stochastic")
        assert first.std == pytest.approx(0.7)


# --- the tables --------------------------------------------------------------------------------


def test_the_tables_show_noise_norm_and_factor_of_each_step():
    stds, norms, factors = tables(20, 5.0, 0.5).values()
    assert "| 1 | 1.0000 | 0.5555 | 0.5000 | 0.0510 | 0.6997 |" in stds
    assert "| 1 | 1.0000 | 0.01875 | 0.02083 | 0.2041 | 0.01458 |" in norms
    assert "| 20 | 0.2083 | 0.05514 | 0.07337 | 0.2446 | 0 |" in factors


def stds_of(num_steps, sde_type, regime):
    return torch.tensor(
        regime_stds(sde_type, shifted_levels(num_steps, 5.0), 0.5, regime), dtype=torch.float64
    )


def test_the_regimes_of_figure_9_differ_only_at_the_first_step():
    width = 1 - shifted_levels(20, 5.0)[1]
    sage, flow = (
        [stds_of(20, name, regime) for regime in REGIMES] for name in ("sage_grpo", "flow_grpo")
    )
    assert [stds[0].item() for stds in sage] == pytest.approx([0, 0.5555, 0.5555], abs=5e-5)
    clamped = 0.5 * math.sqrt(width / (1 - SAGE_SIGMA_MAX))  # 0.93
    assert [stds[0].item() for stds in flow] == pytest.approx([0.5, clamped, 0.5])
    for sigma_1, clamp, own in (sage, flow):
        torch.testing.assert_close(sigma_1[1:], own[1:], rtol=1e-12, atol=0)
        torch.testing.assert_close(clamp[1:], own[1:], rtol=1e-12, atol=0)


def test_at_80_steps_sigma_1_regime_of_sage_starts_at_the_second_level():
    """The second level is above the clamp, which the sigma_1 regime does not use."""
    second, third = shifted_levels(80, 5.0)[1:3]
    stds = stds_of(80, "sage_grpo", "sigma_1")
    integral = math.log((1 - third) / (1 - second)) - (second - third)
    assert second > SAGE_SIGMA_MAX and stds[0] == 0
    assert stds[1] == pytest.approx(0.5 * math.sqrt(integral)) == pytest.approx(0.419, abs=5e-4)


def test_with_many_steps_the_clamp_affects_more_than_the_first_step():
    sage, flow = (
        [stds_of(150, name, regime) for regime in REGIMES] for name in ("sage_grpo", "flow_grpo")
    )
    assert sage[0][0] == 0 and sage[0][1] > 0 and sage[2][1] == 0
    assert torch.equal(sage[1], sage[2])
    assert flow[1][1] < flow[2][1] and torch.equal(flow[0], flow[2])


def noise_by_its_definition(sde_type, levels, eta, regime):
    """Return the standard deviations of sage or flow, independently computed from docs/sde.md."""
    sigma, below = (
        torch.tensor(levels[:-1], dtype=torch.float64),
        torch.tensor(levels[1:], dtype=torch.float64),
    )
    if sde_type == "sage_grpo":
        top = levels[1] if regime == "sigma_1" else SAGE_SIGMA_MAX
        variance = torch.log((1 - below) / (1 - sigma.clamp(max=top))) - (sigma - below)
        variance[below >= top] = 0
    else:
        # the default clamps only the first level
        top = SAGE_SIGMA_MAX if regime == "clamp" else levels[1]
        variance = sigma / (1 - sigma.clamp(max=top)) * (sigma - below)
    return eta * variance.clamp(min=0).sqrt()


@pytest.mark.parametrize(
    "shift",
    [5.0, pytest.param(9.0, marks=pytest.mark.slow)],
)
def test_figure_9_is_the_definition_at_every_number_of_steps(shift):
    for num_steps, regime in itertools.product(NUMBERS_OF_STEPS, REGIMES):
        levels = shifted_levels(num_steps, shift)
        for name in ("sage_grpo", "flow_grpo"):
            drawn = torch.tensor(regime_stds(name, levels, 0.5, regime), dtype=torch.float64)
            expected = noise_by_its_definition(name, levels, 0.5, regime)
            torch.testing.assert_close(drawn, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "computed", [page.fast_tables, pytest.param(page.slow_tables, marks=pytest.mark.slow)]
)
def test_the_page_shows_the_computed_tables(computed, check_generated):
    check_generated(page.PAGE, page.page_with(computed()))
