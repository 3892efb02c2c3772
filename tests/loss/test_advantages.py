"""Tests of the group-relative advantages."""

import math

import pytest
import torch

from hyvideo.loss.advantages import group_advantages, normalized_rewards

NAN = math.nan


def test_advantages_are_standard_scores_with_the_population_deviation():
    advantages = group_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]), 4)
    expected = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(14 / 4)
    torch.testing.assert_close(advantages, expected)


def test_groups_are_consecutive_and_independent():
    first, second = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([10.0, -3.0, 4.0])
    together = group_advantages(torch.cat([first, second]), 3)
    torch.testing.assert_close(
        together, torch.cat([group_advantages(first, 3), group_advantages(second, 3)])
    )


@pytest.mark.parametrize("value", [0.0, 0.1, -0.7539, 1e6])
def test_a_group_of_equal_rewards_has_advantage_0(value):
    assert torch.equal(group_advantages(torch.full((7,), value), 7), torch.zeros(7))


@pytest.mark.parametrize("scale", [1e-20, 1e-15])
def test_rewards_far_closer_than_the_epsilon_are_equal(scale):
    """Their advantages would be below 1e-6: only optimizers without a scale, such as Adam, could
    follow them.
    """
    rewards = scale * torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, 4), torch.zeros(4, dtype=torch.float64))
    assert group_advantages(1e10 * rewards / scale * 1e-20, 4).abs().max() > 1e-3


def test_rewards_that_differ_by_the_rounding_of_their_sum_are_equal():
    rewards = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6], dtype=torch.float64)
    assert len(rewards.unique()) > 1
    assert torch.equal(group_advantages(1e6 * rewards, 3), torch.zeros(3, dtype=torch.float64))


def test_close_rewards_far_from_0_are_told_apart():
    """Float32 would round the mean of these rewards by a sixth of their distance."""
    rewards = torch.tensor([1000.0, 1000.0, 1000.0 + 2.0**-14])
    torch.testing.assert_close(
        group_advantages(rewards, 3), torch.tensor([-0.5, -0.5, 1.0]) * 2**0.5, rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("std", [1.0, 1e-3, 1e-4, 1e-8])
def test_a_standard_score_divides_by_the_deviation_plus_1e_8(std):
    """As in the paper. flow_grpo and DiffusionNFT add 1e-4, which would halve the third advantage
    here.
    """
    advantages = group_advantages(torch.tensor([-std, std], dtype=torch.float64), 2)
    score = std / (std + 1e-8)
    torch.testing.assert_close(
        advantages, torch.tensor([-score, score], dtype=torch.float64), rtol=1e-9, atol=0
    )


def test_advantages_are_clipped_on_both_sides():
    rewards = torch.zeros(100)
    rewards[3] = 1.0  # its standard score is sqrt(99)
    assert group_advantages(rewards, 100)[3] == 5
    assert group_advantages(-rewards, 100)[3] == -5
    assert group_advantages(rewards, 100, clip=2.0)[3] == 2


@pytest.mark.parametrize("missing", [NAN, math.inf, -math.inf])
def test_a_missing_reward_is_excluded_from_its_group(missing):
    advantages = group_advantages(torch.tensor([1.0, missing, 2.0, 6.0]), 4)
    assert advantages[1].isnan()
    torch.testing.assert_close(
        advantages[[0, 2, 3]], group_advantages(torch.tensor([1.0, 2.0, 6.0]), 3)
    )


@pytest.mark.parametrize("rewards", [[1.0, NAN, NAN], [NAN, NAN, NAN]])
def test_a_group_with_fewer_than_two_rewards_has_no_advantages(rewards):
    advantages = group_advantages(torch.tensor([*rewards, 1.0, 2.0, 3.0]), 3)
    assert advantages[:3].isnan().all()
    assert advantages[3:].isfinite().all()


@pytest.mark.parametrize("shape, group_size", [((5,), 2), ((4,), 0)])
def test_rewards_must_be_whole_groups(shape, group_size):
    with pytest.raises(ValueError, match=str(group_size)):
        group_advantages(torch.zeros(shape), group_size)


# --- several dimensions ---------------------------------------------------------------------------

SCORES = torch.tensor(
    [[1.0, 5.0], [2.0, 5.0], [3.0, 8.0], [0.0, 4.0], [9.0, 4.0], [9.0, 4.0]], dtype=torch.float64
)
WEIGHTS = torch.tensor([0.5, -2.0], dtype=torch.float64)


def test_each_dimension_is_a_standard_score_of_its_group_before_it_is_weighted():
    first = 0.5 * torch.tensor([-1.0, 0.0, 1.0]) / math.sqrt(2 / 3) - 2 * torch.tensor(
        [-1.0, -1.0, 2.0]
    ) / math.sqrt(2)
    # the other dimension is constant and contributes 0
    second = 0.5 * torch.tensor([-2.0, 1.0, 1.0]) / math.sqrt(2)
    torch.testing.assert_close(
        normalized_rewards(SCORES, WEIGHTS, 3), torch.cat([first, second]).double()
    )


@pytest.mark.parametrize("size", [26, 27])
def test_dimensions_are_not_clipped_before_they_are_summed(size):
    """The best of n rollouts has at most the standard score sqrt(n - 1), which is above 5 from n =
    27 on.
    """
    scores = torch.zeros(size, 2, dtype=torch.float64)
    scores[0, 0] = scores[1, 1] = 1.0
    rewards = normalized_rewards(scores, torch.tensor([1.0, 3.0], dtype=torch.float64), size)
    high, low = (size - 1) ** 0.5, -((size - 1) ** -0.5)
    expected = torch.full((size,), 4 * low, dtype=torch.float64)
    expected[0] = high + 3 * low
    expected[1] = low + 3 * high
    torch.testing.assert_close(rewards, expected, rtol=1e-6, atol=1e-6)


def test_a_rollout_without_all_scores_is_excluded_from_every_dimension():
    scores = torch.cat([SCORES[:3], torch.tensor([[50.0, NAN]], dtype=torch.float64)])
    rewards = normalized_rewards(scores, WEIGHTS, 4)
    torch.testing.assert_close(rewards[:3], normalized_rewards(SCORES[:3], WEIGHTS, 3))
    assert rewards[3].isnan()
