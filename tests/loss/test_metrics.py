"""Tests of an iteration's metrics, also with missing rewards."""

import math

import pytest
import torch

from hyvideo.loss.advantages import group_advantages
from hyvideo.loss.metrics import UpdateResult, average, quantiles, reward_metrics, sums_by_step

NAN = math.nan
NAMES = ("VQ", "MQ", "TA")
DEVIATIONS = ("policy/ratio_max_deviation", "policy/ratio_first_deviation")


def metrics_of(*groups):
    totals = torch.tensor(groups, dtype=torch.float64).flatten()
    rewards = torch.stack([totals, totals, 2 * totals, 3 * totals], dim=1)
    return reward_metrics(rewards, group_advantages(totals, len(groups[0])), len(groups[0]), NAMES)


def test_means_are_over_the_scored_rollouts():
    metrics = metrics_of([1.0, 3.0], [NAN, 5.0])
    assert metrics["reward/mean"] == metrics["reward/VQ"] == 3
    assert metrics["reward/TA"] == 9 and metrics["reward/missing"] == 1


def test_a_group_with_one_score_has_no_standard_deviation():
    assert metrics_of([0.0, 2.0, 0.0, 2.0], [3.0, NAN, NAN, NAN])["reward/std"] == 1


def test_equal_rewards_beside_a_missing_one_are_a_zero_group():
    assert metrics_of([1.0, 1.0, 1.0, NAN], [0.0, 2.0, 0.0, 2.0])["advantage/zero_groups"] == 1
    assert metrics_of([NAN, NAN], [0.0, 2.0])["advantage/zero_groups"] == 0


def test_a_dimension_missing_in_one_rollout_is_averaged_over_the_others():
    rewards = torch.tensor([[1.0, NAN, 2.0, 3.0], [1.0, 4.0, 2.0, 3.0]], dtype=torch.float64)
    assert reward_metrics(rewards, torch.zeros(2), 2, NAMES)["reward/VQ"] == 4


def test_quantiles_are_those_of_the_scored_rollouts():
    metrics = metrics_of([0.0, 20.0, 10.0], [5.0, 15.0, NAN])
    # 0, 5, ..., 20 in equal steps
    assert metrics["quantiles/reward"] == [float(k) for k in range(21)]
    assert len(metrics["quantiles/advantage"]) == 21
    assert metrics["quantiles/advantage"] == sorted(metrics["quantiles/advantage"])
    assert (
        quantiles(torch.tensor([NAN])) == [] and quantiles(torch.tensor([1 / 3])) == [0.33333] * 21
    )


def test_updates_are_averaged_by_their_terms_except_for_deviations():
    results = [
        UpdateResult({"loss/total": 1.0, "policy/ratio_max_deviation": 0.0}, 1),
        UpdateResult({"loss/total": 4.0, "policy/ratio_max_deviation": 0.2}, 2),
    ]
    assert average(results, deviation_names=DEVIATIONS) == pytest.approx(
        {"loss/total": 3.0, "policy/ratio_max_deviation": 0.2, "policy/ratio_first_deviation": 0.0}
    )
    assert average([], deviation_names=DEVIATIONS) == {}


def test_ratio_and_kl_are_reported_by_denoising_step_over_all_updates():
    ratios, kls = torch.tensor([1.5, 0.5, 1.0, 0.25]), torch.tensor([1.0, 3.0, 5.0, 7.0])
    first = sums_by_step(
        torch.stack([ratios, kls]), (ratios - 1).abs(), torch.tensor([0, 0, 2, 2]), 4
    )
    second = sums_by_step(torch.tensor([[3.0], [8.0]]), torch.tensor([2.0]), torch.tensor([0]), 4)
    metrics = {"policy/ratio_max_deviation": 0.0}
    results = [UpdateResult(metrics, 4, first), UpdateResult(metrics, 1, second)]
    metrics_by_step = average(results, deviation_names=DEVIATIONS, by_step=("policy/ratio_mean",))
    assert metrics_by_step["by_step/ratio_mean"] == pytest.approx([5 / 3, None, 0.625, None])
    assert metrics_by_step["by_step/kl"] == pytest.approx([4.0, None, 6.0, None])
    assert metrics_by_step["by_step/ratio_max_deviation"] == [2.0, None, 0.75, None]


def test_sums_by_step_are_float64_and_the_largest_deviation_is_a_maximum():
    ratios, kls = (
        torch.tensor([2.0**24, 1.0, 1.0, 0.5]),
        torch.tensor([-(2.0**24), -1.0, -1.0, 3.0]),
    )
    sums = sums_by_step(
        torch.stack([ratios, kls]), (ratios - 1).abs(), torch.tensor([1, 1, 1, 0]), 3
    )
    assert sums.tolist() == [
        [1, 3, 0],
        [0.5, 2**24 + 2, 0],
        [3, -(2**24) - 2, 0],
        [0.5, 2**24 - 1, 0],
    ]
