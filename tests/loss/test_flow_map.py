"""Tests of the derivative of a flow map, on a Gaussian flow whose velocity is known."""

import pytest
import torch

from hyvideo.loss.flow_map import derivative_term, differences

MEAN, STD = 1.3, 0.5


def std_at(level):
    return ((1 - level) ** 2 * STD**2 + level**2).sqrt()


def velocity(latents, level):
    """Return E[e - x0 | x_s] for data ~ N(MEAN, STD^2)."""
    centered = (latents - (1 - level) * MEAN) / std_at(level) ** 2
    return level * centered - (MEAN + (1 - level) * STD**2 * centered)


def mean_velocity(latents, level, end):
    """Return the mean velocity of the path from ``level`` to ``end``."""
    centered = latents - (1 - level) * MEAN
    arrived = (1 - end) * MEAN + std_at(end) / std_at(level) * centered
    return (latents - arrived) / (level - end)


def intervals():
    levels = torch.tensor([0.15, 0.3, 0.6, 0.8, 0.95], dtype=torch.float64)
    starts = levels.repeat_interleave(4)
    shares = torch.tensor([0.0, 0.2, 0.5, 0.9], dtype=torch.float64)
    return starts, starts * shares.repeat(5)


def error_of(difference):
    """Return the largest error of ``u + (s - r) du/ds``, relative to the largest velocity."""
    starts, ends = intervals()
    latents = torch.linspace(-3, 3, 7, dtype=torch.float64).expand(20, 7)
    column = starts.unsqueeze(1)
    expected = velocity(latents, column)
    term = derivative_term(
        lambda at, level: mean_velocity(at, level.unsqueeze(1), ends.unsqueeze(1)),
        latents,
        expected,
        starts,
        ends,
        difference=difference,
    )
    found = mean_velocity(latents, column, ends.unsqueeze(1)) + term
    return ((found - expected).abs().amax() / expected.abs().amax()).item()


def test_the_identity_gives_the_velocity_of_a_gaussian_flow_with_an_error_of_second_order():
    errors = [error_of(difference) for difference in (0.01, 0.005, 0.0025)]
    assert errors[1] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)


def test_the_mean_over_the_noise_of_re_noised_samples_is_also_the_velocity():
    """A re-noised sample has the tangent ``e - x0``, whose mean at x_s is the velocity."""
    generator = torch.Generator().manual_seed(0)
    start, end, latents = torch.tensor([[0.6], [0.2], [0.7]], dtype=torch.float64)
    gain = (1 - start) * STD**2 / std_at(start) ** 2
    mean = MEAN + gain * (latents - (1 - start) * MEAN)
    spread = (STD**2 * (1 - (1 - start) * gain)).sqrt()
    samples = mean + spread * torch.randn(100_000, 1, generator=generator, dtype=torch.float64)
    tangent = (latents - (1 - start) * samples) / start - samples
    term = derivative_term(
        lambda at, level: mean_velocity(at, level.unsqueeze(1), end),
        latents.expand_as(tangent),
        tangent,
        start.expand(100_000),
        end.expand(100_000),
    )
    found = mean_velocity(latents, start, end) + term.mean()
    assert found.item() == pytest.approx(velocity(latents, start).item(), abs=3e-3)


def test_the_term_is_zero_for_intervals_without_length_and_has_no_gradient():
    weight = torch.ones(1, requires_grad=True)
    levels = torch.tensor([0.3, 0.7])
    latents = torch.ones(2, 3)
    term = derivative_term(
        lambda at, level: weight * at * level.unsqueeze(1),
        latents,
        latents,
        levels,
        torch.tensor([0.3, 0.2]),
    )
    assert not term.requires_grad and not term[0].any()
    # d(x s)/ds = dx/ds s + x = 0.7 + 1, times 0.7 - 0.2
    torch.testing.assert_close(term[1], torch.full((3,), 0.85), rtol=1e-4, atol=0)


def test_long_intervals_have_a_longer_difference_that_stays_within_the_noise_levels():
    starts = torch.tensor([0.02, 0.5, 0.5, 0.98, 0.975, 0.9])
    ends = torch.tensor([0.0, 0.3, 0.1, 0.0, 0.0, 0.0])
    found = differences(starts, ends)
    torch.testing.assert_close(found, torch.tensor([0.02, 0.02, 0.03, 0.02, 0.025, 0.03]))
    assert (starts + found).max() <= 1 and (starts - found).min() >= 0


def test_an_interval_without_a_length_has_no_term_up_to_the_highest_level():
    levels = torch.tensor([0.001, 0.5, 0.999])
    steps = differences(levels, levels)
    torch.testing.assert_close(steps, torch.tensor([0.001, 0.02, 0.001]))
    assert (levels + steps).max() <= 1 and (levels - steps).min() >= 0
    latents = torch.randn(3, 4)
    term = derivative_term(lambda x, s: x * s[:, None] ** 2, latents, latents, levels, levels)
    assert not term.any()
