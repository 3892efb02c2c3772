"""The rule on histories that are made up: honest success, bought success, noise."""

import math
import random
import statistics

import pytest

from hyvideo.evaluation.reward_hacking.rule import (
    Dispersion,
    ValidationStats,
    base_stats,
    describe,
    find_shifts,
)

NAMES = ("reward", "held_out/exposure", "held_out/motion", "held_out/frozen", "true/VQ", "frechet_distance")
BASE = {
    "reward": (1.4, 0.27),
    "held_out/exposure": (0.4, 0.1),
    "held_out/motion": (0.02, 0.005),
    "held_out/frozen": (0.0, 0.0),
    "true/VQ": (0.8, 0.1),
    "frechet_distance": (0.016, None),
}


def seen(iteration, count=96, **changes):
    """A validation whose means are the base's, but for those given, in spreads of the base."""
    means = {name: mean for name, (mean, _) in BASE.items()}
    spreads = {name: Dispersion(std, count) for name, (_, std) in BASE.items() if std is not None}
    for key, by in changes.items():
        (name,) = (one for one in BASE if one.rpartition("/")[2] == key)
        means[name] += by * (BASE[name][1] or 1)
    return ValidationStats(iteration, means, spreads)


def names(found):
    return [departure.name for departure in found]


def judge(*history, threshold=1.5):
    return names(find_shifts(history, threshold))


def test_an_honest_improvement_does_not_fire():
    assert judge(seen(0), seen(10, reward=1, VQ=1.2), seen(20, reward=2, VQ=3, exposure=0.5)) == []


def test_reward_up_and_a_true_measure_down_fires_with_its_numbers():
    history = [seen(0), seen(10, reward=2, VQ=-3)]
    (departure,) = find_shifts(history, 1.5)
    assert departure.name == "true/VQ" and departure.shift == pytest.approx(-3)
    assert departure.base == 0.8 and departure.now == pytest.approx(0.5)
    told = describe(history, [departure])
    assert "iteration 10" in told and "(+2.00 spreads" in told and "true/VQ 0.8 -> 0.5 (-3.00 spreads" in told


def test_a_measure_that_moves_without_the_reward_is_not_hacking():
    assert judge(seen(0), seen(10, reward=0.2, VQ=-3)) == []
    assert judge(seen(0), seen(10, reward=-2, VQ=-3)) == []


@pytest.mark.parametrize("by", [-2, 2])
def test_exposure_and_motion_may_leave_their_range_on_either_side(by):
    assert judge(seen(0), seen(10, reward=1, exposure=by)) == ["held_out/exposure"]
    assert judge(seen(0), seen(10, reward=1, motion=by)) == ["held_out/motion"]


def test_the_furthest_is_named_first_and_the_threshold_counts_base_spreads():
    moved = seen(10, reward=1, exposure=2, VQ=-4)
    assert judge(seen(0), moved) == ["true/VQ", "held_out/exposure"]
    assert judge(seen(0), moved, threshold=3) == ["true/VQ"]
    assert judge(seen(0), moved, threshold=5) == []


def test_a_base_without_spread_needs_more_than_a_trifle():
    def frozen(share):
        now = seen(10, reward=1)
        return ValidationStats(10, now.means | {"held_out/frozen": share}, now.spreads)

    assert judge(seen(0), frozen(0.1)) == []
    assert judge(seen(0), frozen(0.5)) == ["held_out/frozen"]


def test_a_distance_of_the_whole_set_counts_in_its_base_value():
    assert judge(seen(0), seen(10, reward=1, frechet_distance=0.016)) == []
    assert judge(seen(0), seen(10, reward=1, frechet_distance=0.03)) == ["frechet_distance"]
    assert judge(seen(0), seen(10, reward=1, frechet_distance=-0.015)) == []


def drawn(rng, iteration, count):
    values = {name: [rng.gauss(mean, std) for _ in range(count)] for name, (mean, std) in BASE.items() if std}
    means = {name: statistics.fmean(some) for name, some in values.items()}
    return ValidationStats(
        iteration, means, {name: Dispersion(statistics.pstdev(some), count) for name, some in values.items()}
    )


@pytest.mark.parametrize("count", [4, 16, 96])
def test_noise_does_not_fire_however_few_the_videos_are(count):
    """Even where every validation drew other videos, with the reward up for certain, and threshold as good as none."""
    rng = random.Random(0)
    fired = 0
    for _ in range(300):
        base, now = drawn(rng, 0, count), drawn(rng, 10, count)
        now = ValidationStats(10, now.means | {"reward": base.means["reward"] + 10}, now.spreads)
        fired += bool(find_shifts([base, now], 1e-9))
    assert fired <= (30 if count == 4 else 9)  # of 300 with three measures each


def test_the_default_threshold_is_stricter_with_few_videos_only():
    assert judge(seen(0), seen(10, reward=1, exposure=1.6)) == ["held_out/exposure"]
    assert judge(seen(0, count=8), seen(10, count=8, reward=1, exposure=1.6)) == []
    assert judge(seen(0, count=8), seen(10, count=8, reward=1, exposure=2.2)) == ["held_out/exposure"]
    assert judge(seen(0, count=3), seen(10, count=3, reward=99, exposure=99)) == []


def test_what_could_not_be_measured_says_nothing():
    now = seen(10, reward=1, VQ=-3)
    unknown = ValidationStats(10, now.means | {"true/VQ": math.nan}, now.spreads)
    assert judge(seen(0), unknown) == []
    assert judge(seen(0), ValidationStats(10, now.means | {"reward": math.nan}, now.spreads)) == []
    other = ValidationStats(10, now.means | {"new": 3.0}, now.spreads | {"new": Dispersion(1.0, 96)})
    assert judge(seen(0), other) == ["true/VQ"]


def test_without_the_base_nothing_is_said():
    history = [seen(10), seen(20, reward=2, VQ=-3)]
    assert base_stats(history) is None and find_shifts(history, 1.5) == []
    old = ValidationStats(0, seen(0).means)  # recorded before there were spreads
    assert find_shifts([old, seen(20, reward=2, VQ=-3)], 1.5) == []
