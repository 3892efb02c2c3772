"""Conformance of samplers: marginals and their rate, every step against torch, boundaries of all
schedules.

Single transitions are tested in test_transitions.py and test_schedule.py.
"""

import itertools
import math

import pytest
import torch

from examples.sampler_figures import REGIMES, regime_stds
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import SAGE_SIGMA_MAX, SAMPLERS, schedule, shifted_levels
from scripts.pages.marginals import ETAS, TWO_PEAKS, Mixture, interior_error
from scripts.pages.sampler_tables import kl_factor
from tests.schedulers.expected import expected_of

ONE_PEAK = Mixture(means=(0.7,), std=0.4)
NUMBERS_OF_STEPS = range(4, 201)
SHIFTS = (1.0, 3.0, 5.0, 7.0, 9.0)


# --- marginals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [pytest.param(ONE_PEAK, marks=pytest.mark.slow), TWO_PEAKS], ids=["gaussian", "mixture"]
)
@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_marginals_are_correct_to_first_order_in_the_step(sde_type, data):
    """Twice the steps halve the distance, also for cps if eta decreases with the step width. Of few
    steps, the rate differs from 1 by the next order, and a distance that stays has a rate of 0.
    """
    *_, eta_of_width = ETAS[sde_type].values()
    errors = [interior_error(sde_type, num_steps, eta_of_width, data) for num_steps in (16, 32, 64)]
    rates = [math.log2(error / half) for error, half in zip(errors, errors[1:])]
    assert errors[-1] < 0.015
    assert all(0.9 < rate < 1.2 for rate in rates) and 0.95 < rates[-1], rates


def test_cps_at_a_fixed_eta_does_not_converge_to_the_marginal():
    half = lambda width: 0.5  # noqa: E731
    errors = [interior_error("cps", num_steps, half, ONE_PEAK) for num_steps in (32, 64)]
    assert errors[1] > 0.7 * errors[0] and errors[1] > 0.02


# --- the standard deviation of KL terms --------------------------------------------------------


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
def test_the_kl_has_the_std_of_the_step_for_all_shifts_of_at_least_1(sde_type):
    for num_steps, shift, eta in itertools.product(range(2, 201, 11), SHIFTS, (0.1, 0.5, 0.9)):
        for step in schedule(sde_type, shifted_levels(num_steps, shift), eta, "stochastic"):
            assert step.kl_std in (None, step.std)


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("eta", [0.2, 0.5, 0.9])
def test_the_kl_of_a_step_to_a_low_level_is_bounded(sde_type, eta):
    """A public run with cps was lost to a KL of the last noisy step that was 70,000 times too large:
    schedules of other programs end at a level near 0.
    """
    factors = []
    for sigma_next in (0.05, 5e-3, 5e-4, 5e-6):
        step = SAMPLERS[sde_type].transition(0.2, sigma_next, eta, 0.9)
        if sde_type in ("cps", "precise", "dance_precise", "anchored"):
            share = step.std / sigma_next
            assert step.kl_std == pytest.approx(share * max(sigma_next, (0.2 - sigma_next) / 2))
        factors.append(kl_factor(step, step.kl_std or step.std))
    assert max(factors) < 1.3 / eta**2 + 2


# --- every step against torch ------------------------------------------------------------------


@pytest.mark.parametrize("sde_type", list(SAMPLERS))
@pytest.mark.parametrize("num_steps, shift", [(4, 1.0), (200, 9.0)])
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


@pytest.mark.parametrize("num_steps, shift", [(4, 1.0), (200, 5.0)])
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


@pytest.mark.parametrize("shift, fewest", [(3, 112), (9, 38)])
def test_the_first_step_of_sage_is_deterministic_from_a_number_of_steps(shift, fewest):
    for num_steps, is_stochastic in ((fewest - 1, True), (fewest, False)):
        first, *_ = schedule("sage_grpo", shifted_levels(num_steps, shift), 0.5, "stochastic")
        assert first.is_stochastic is is_stochastic


# --- the tables --------------------------------------------------------------------------------


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


def test_figure_9_is_the_definition_at_every_number_of_steps():
    shift = 5.0
    for num_steps, regime in itertools.product(NUMBERS_OF_STEPS[::4], REGIMES):
        levels = shifted_levels(num_steps, shift)
        for name in ("sage_grpo", "flow_grpo"):
            drawn = torch.tensor(regime_stds(name, levels, 0.5, regime), dtype=torch.float64)
            expected = noise_by_its_definition(name, levels, 0.5, regime)
            torch.testing.assert_close(drawn, expected, rtol=1e-9, atol=1e-12)
