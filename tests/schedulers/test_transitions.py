"""Tests of the transitions: their closed forms, the marginals they keep, and their boundary
rules.
"""

import math

import pytest
import torch

from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import (
    SAGE_SIGMA_MAX,
    SAMPLERS,
    levels_of_steps,
    ode_transition,
    sage_variance,
    sampler_of,
    schedule,
    shifted_levels,
)
from scripts.pages.marginals import TWO_PEAKS
from tests.schedulers.expected import EXPECTED, expected_of

VARIANCES = [
    name
    for name, sampler in SAMPLERS.items()
    if isinstance(sampler.step(0.8, 0.6, 0.7, 0.9), float)
]
LEVELS = shifted_levels(20, 5.0)
PLACES = (0, 1, 10, 19)  # first, second, middle and last step
INTERIOR = [(0.95, 0.9), (0.9, 0.7), (0.5, 0.45), (0.2, 0.05), (0.2, 0.0)]


# --- closed form -------------------------------------------------------------------------------


def test_levels_are_a_shifted_even_grid():
    assert LEVELS[:5] == pytest.approx([1, 0.9896, 0.9783, 0.9659, 0.9524], abs=5e-5)
    assert LEVELS[-3:] == pytest.approx([0.3571, 0.2083, 0], abs=5e-5)
    assert len(LEVELS) == 21 and LEVELS[0] == 1 and LEVELS[-1] == 0


@pytest.mark.parametrize("sde_type", list(SAMPLERS | EXPECTED))
def test_stds_of_twenty_steps_are_the_expected_values(sde_type):
    stds = expected_of(sde_type).stds  # fails with instructions for a new sampler
    steps = schedule(sde_type, LEVELS, 0.5, "stochastic")
    assert [steps[i].std for i in PLACES] == pytest.approx(stds, abs=6e-5)


@pytest.mark.parametrize("sigma, sigma_next", INTERIOR)
def test_sage_variance_is_the_integral_of_g_squared(sigma, sigma_next):
    s = torch.linspace(sigma_next, sigma, 100_001, dtype=torch.float64)
    integral = torch.trapezoid(0.7**2 * s / (1 - s), s).item()
    assert sage_variance(sigma, sigma_next, 0.7, 0.99) == pytest.approx(integral, rel=1e-7)


def test_first_sage_step_stops_short_of_the_pole():
    expected = 0.7**2 * (math.log(0.1 / (1 - SAGE_SIGMA_MAX)) - 0.1)
    assert sage_variance(1.0, 0.9, 0.7, 0.9) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sde_type", VARIANCES)
@pytest.mark.parametrize("sigma, sigma_next", [(1.0, 0.9), *INTERIOR])
def test_mean_is_the_euler_step_plus_half_the_variance_times_the_score(sde_type, sigma, sigma_next):
    x, v = 0.3, -1.7
    step = SAMPLERS[sde_type].transition(sigma, sigma_next, 0.7, 0.9)
    x0_hat = x - sigma * v
    score = -(x - (1 - sigma) * x0_hat) / sigma**2
    expected = x + (sigma_next - sigma) * v + step.std**2 / 2 * score
    assert step.a * x + step.b * v == pytest.approx(expected, rel=1e-10)
    assert step.std**2 == pytest.approx(
        SAMPLERS[sde_type].step(sigma, sigma_next, 0.7, 0.9), rel=1e-12
    )


@pytest.mark.parametrize("sigma, sigma_next", [(1.0, 0.9), *INTERIOR[:-1]])
def test_cps_mean_recombines_the_predicted_data_and_noise(sigma, sigma_next):
    x, v = 0.3, -1.7
    step = SAMPLERS["cps"].transition(sigma, sigma_next, 0.7, 0.9)
    x0_hat, x1_hat = x - sigma * v, x + (1 - sigma) * v
    std = sigma_next * math.sin(0.35 * math.pi)
    expected = (1 - sigma_next) * x0_hat + math.sqrt(sigma_next**2 - std**2) * x1_hat
    assert step.a * x + step.b * v == pytest.approx(expected, rel=1e-10)
    assert step.std == pytest.approx(std)


@pytest.mark.parametrize("sigma, sigma_next", INTERIOR[:-1])
@pytest.mark.parametrize(
    "sde_type, diffusion", [("precise", lambda s: s / (1 - s)), ("dance_precise", lambda s: 1.0)]
)
def test_precise_solves_the_sde_with_frozen_data_exactly(sde_type, diffusion, sigma, sigma_next):
    """Many small Euler-Maruyama steps of the noise part ``r = x - (1 - s) x0``, which obeys
    ``r' = (1 - d / s - V / (2 s^2)) r + sqrt(V) noise``.
    """
    levels = torch.linspace(sigma, sigma_next, 50_001, dtype=torch.float64).tolist()
    factor, variance = 1.0, 0.0
    for s, below in zip(levels, levels[1:]):
        noise = 0.7**2 * diffusion(s) * (s - below)
        shrinks = 1 - (s - below) / s - noise / (2 * s**2)
        factor, variance = factor * shrinks, variance * shrinks**2 + noise
    x0, r = 0.4, -0.9
    x = (1 - sigma) * x0 + r
    step = SAMPLERS[sde_type].transition(sigma, sigma_next, 0.7, 0.9)
    mean = step.a * x + step.b * (r / sigma - x0)
    assert step.std == pytest.approx(math.sqrt(variance), rel=1e-4)
    assert mean == pytest.approx((1 - sigma_next) * x0 + factor * r, rel=1e-4)


def test_an_anchored_step_goes_to_the_anchor_and_back_by_noise():
    x, v, sigma, sigma_next, anchor = 0.3, -1.7, 0.8, 0.6, 0.42
    step = SAMPLERS["anchored"].transition(sigma, sigma_next, 0.3, 0.9)
    kept = (1 - sigma_next) / (1 - anchor)
    assert step.until == pytest.approx(anchor)
    assert step.a * x + step.b * v == pytest.approx(kept * (x + (anchor - sigma) * v))
    # the noise of x_anchor, kept times, and the new noise have the variance of the level
    assert (kept * anchor) ** 2 + step.std**2 == pytest.approx(sigma_next**2)
    assert SAMPLERS["anchored"].transition(sigma, sigma_next, 1.0, 0.9).until == 0


def exact_flow_map(x, sigma, end, substeps=100):
    """Return the mean velocity of the ODE of two peaks from ``sigma`` to ``end``, by midpoint steps."""
    levels = torch.linspace(sigma, end, substeps + 1, dtype=torch.float64).tolist()
    moved = x
    for level, below in zip(levels, levels[1:]):
        middle = moved + (below - level) / 2 * TWO_PEAKS.velocity(moved, level)
        moved = moved + (below - level) * TWO_PEAKS.velocity(middle, (level + below) / 2)
    return (moved - x) / (end - sigma)


def test_an_anchored_sampler_keeps_the_marginals_of_an_exact_flow_map():
    """Wasserstein distance to the data after four steps, from 20,000 samples."""

    def distance(sde_type, eta):
        torch.manual_seed(0)
        made = Schedule.build(sde_type, num_steps=4, shift=3.0, eta=eta)
        x = torch.randn(20_000, dtype=torch.float64)
        for step, sigma, end in zip(made.transitions, made.sigmas, made.ends.double() / 1000):
            velocity = exact_flow_map(x, sigma, float(end))
            x = step.a * x + step.b * velocity + step.std * torch.randn_like(x)
        peaks = torch.tensor(TWO_PEAKS.means, dtype=torch.float64)[torch.arange(len(x)) % 2]
        data = peaks + TWO_PEAKS.std * torch.randn_like(x)
        return (x.sort().values - data.sort().values).abs().mean().item()

    assert max(distance("anchored", eta) for eta in (0.3, 1.0)) < 0.02
    assert distance("cps", 1.0) > 0.03


def test_the_first_step_of_precise_is_clamped_like_that_of_sage():
    step = SAMPLERS["precise"].transition(1.0, 0.9, 0.7, 0.9)
    rho = 0.9 * (1 - SAGE_SIGMA_MAX) / (SAGE_SIGMA_MAX * 0.1)
    assert step.std == pytest.approx(0.9 * math.sqrt(1 - rho**0.49))
    assert SAMPLERS["precise"].transition(1.0, 0.998, 0.7, 0.9) == ode_transition(1.0, 0.998)


def test_gradient_norm_is_the_mean_slope_in_standard_deviations():
    step = SAMPLERS["sage_grpo"].transition(0.8, 0.6, 0.7, 0.9)
    slope = -0.2 - step.std**2 / 2 * 0.2 / 0.8
    assert SAMPLERS["sage_grpo"].log_prob_grad_norm(step) == pytest.approx(-slope / step.std)


def test_gradient_norm_of_cps_follows_the_log_prob_without_constants():
    step = SAMPLERS["cps"].transition(0.8, 0.6, 0.5, 0.9)
    slope = -0.8 * 0.4 + 0.2 * 0.6 * math.cos(math.pi / 4)
    assert SAMPLERS["cps"].log_prob_grad_norm(step) == pytest.approx(
        -2 * slope * 0.6 * math.sin(math.pi / 4)
    )


# --- marginals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps, eta", [(1, 0.5), (20, 0.5), (20, 1.0)])
@pytest.mark.parametrize("sde_type", ["cps", "precise", "dance_precise", "anchored"])
def test_the_marginals_of_a_single_data_point_are_kept_for_any_number_of_steps(
    sde_type, num_steps, eta
):
    point, mean, variance = 2.0, 0.0, 1.0
    levels = shifted_levels(num_steps, 5.0)
    for sigma, sigma_next in zip(levels, levels[1:]):
        step = SAMPLERS[sde_type].transition(sigma, sigma_next, eta, levels[1])
        slope, offset = 1 / sigma, -point / sigma  # v = (x - x0) / sigma
        mean = (step.a + step.b * slope) * mean + step.b * offset
        variance = (step.a + step.b * slope) ** 2 * variance + step.std**2
        assert mean == pytest.approx((1 - sigma_next) * point, abs=1e-12)
        assert variance == pytest.approx(sigma_next**2, abs=1e-12)


def test_the_levels_of_four_steps_are_those_of_released_students():
    """The samplers of LightX2V's student of HunyuanVideo-1.5 and of AnyFlow step through these five
    levels.
    """
    expected = (1.0, 0.9375, 0.8333333333333334, 0.625, 0.0)
    assert shifted_levels(4, 5.0) == levels_of_steps(4, 5.0) == pytest.approx(expected, abs=1e-15)
    assert levels_of_steps(4, 7.0, "1,0.9375,0.8333333333333334,0.625") == expected


@pytest.mark.parametrize("levels", [shifted_levels(4, 5.0), (1.0, 0.757, 0.522, 0.0)])
def test_cps_at_eta_1_is_the_sampler_that_predicts_the_data_and_adds_new_noise(levels):
    """The sampler of DMD2, rCM, Self-Forcing and FastWan: x' = (1 - sigma') x0_hat + sigma' noise,
    exactly.
    """
    steps = schedule("cps", levels, 1.0, "stochastic")
    torch.manual_seed(0)
    made = Schedule(sampler_of("cps"), levels, steps)
    for index, (sigma, sigma_next) in enumerate(zip(levels, levels[1:])):
        step = steps[index]
        if sigma_next == 0:
            assert step == ode_transition(sigma, 0.0)  # the predicted data
            continue
        assert (step.a, step.b, step.std) == (1 - sigma_next, -sigma * (1 - sigma_next), sigma_next)
        sample, velocity, noise = torch.randn(3, 2, 1, 1, 4, 4).unbind()
        found = made.step(velocity, sample, index, noise)
        predicted = sample - sigma * velocity
        torch.testing.assert_close(found.sample, (1 - sigma_next) * predicted + sigma_next * noise)
        assert found.std.unique().tolist() == [torch.tensor(sigma_next).item()]


# --- boundaries --------------------------------------------------------------------------------


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_eta_0_is_the_euler_step_everywhere(sde_type):
    steps = schedule(sde_type, LEVELS, 0.0, "stochastic")
    assert list(steps) == [ode_transition(*pair) for pair in zip(LEVELS, LEVELS[1:])]
    assert not any(step.is_stochastic for step in steps)


@pytest.mark.parametrize("num_steps", [70, 500])
def test_sage_is_deterministic_if_both_levels_are_above_the_clamp(num_steps):
    levels = shifted_levels(num_steps, 5.0)
    steps = schedule("sage_grpo", levels, 0.5, "stochastic")
    for step, *pair in zip(steps, levels, levels[1:]):
        if pair[1] >= SAGE_SIGMA_MAX:
            assert step == ode_transition(*pair)
        assert math.isfinite(step.a) and math.isfinite(step.b) and math.isfinite(step.std)
    assert not steps[0].is_stochastic and steps[-1].is_stochastic


def test_sage_is_deterministic_just_below_the_clamp_instead_of_having_a_negative_variance():
    assert sage_variance(1.0, 0.9969999, 0.5, 0.9969999) == 0
    assert SAMPLERS["sage_grpo"].transition(1.0, 0.9969999, 0.5, 0.9969999) == ode_transition(
        1.0, 0.9969999
    )


@pytest.mark.parametrize("eta", [0.5, 1.0])
@pytest.mark.parametrize("sde_type", ["cps", "precise", "dance_precise", "anchored"])
def test_the_last_step_of_recombined_data_and_noise_is_deterministic(sde_type, eta):
    steps = schedule(sde_type, LEVELS, eta, "stochastic")
    assert steps[-1] == ode_transition(LEVELS[-2], 0.0)
    assert all(step.is_stochastic for step in steps[:-1])


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_a_deterministic_last_step_ends_at_the_predicted_data(sde_type):
    deterministic = schedule(sde_type, LEVELS, 0.5, "deterministic")
    stochastic = schedule(sde_type, LEVELS, 0.5, "stochastic")
    assert deterministic[:-1] == stochastic[:-1]
    assert (
        deterministic[-1].a == 1
        and deterministic[-1].b == -LEVELS[-2]
        and deterministic[-1].std == 0
    )


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_a_deterministic_step_has_gradient_norm_0(sde_type):
    assert SAMPLERS[sde_type].log_prob_grad_norm(ode_transition(0.8, 0.6)) == 0


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_a_schedule_of_one_step_is_finite(sde_type):
    (step,) = schedule(sde_type, shifted_levels(1, 5.0), 0.5, "stochastic")
    assert all(math.isfinite(value) for value in (step.a, step.b, step.std))
