"""Tests of the temporal gradient equalizer."""

import torch

from hyvideo.loss.equalizer import balancing_factors


def test_factors_are_the_median_divided_by_each_norm():
    factors = balancing_factors(torch.tensor([0.5, 4.0, 1.0]))
    torch.testing.assert_close(factors, torch.tensor([2.0, 0.25, 1.0]))


def test_the_median_of_an_even_number_is_the_lower_of_the_middle_two():
    factors = balancing_factors(torch.tensor([4.0, 1.0, 100.0, 2.0]))
    torch.testing.assert_close(factors, 2 / torch.tensor([4.0, 1.0, 100.0, 2.0]))


def test_deterministic_steps_have_factor_0_and_are_excluded_from_the_median():
    factors = balancing_factors(torch.tensor([0.0, 0.5, 4.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(factors, torch.tensor([0.0, 2.0, 0.25, 1.0, 0.0, 0.0]))


def test_a_schedule_without_noise_has_factors_0():
    assert torch.equal(balancing_factors(torch.zeros(4)), torch.zeros(4))


def test_epsilon_is_added_to_the_norm():
    torch.testing.assert_close(
        balancing_factors(torch.tensor([1.0, 3.0, 2.0]), eps=1.0), 2 / torch.tensor([2.0, 4, 3])
    )
