"""The reward-hacking rule on synthetic histories: honest improvement, reward hacking, noise."""

import math
import statistics

import numpy as np
import pytest

from hyvideo.settings.sections import ValidationSettings
from hyvideo.validation import held_out
from hyvideo.validation.held_out import (
    WATCHED,
    Dispersion,
    ValidationStats,
    student_quantile,
    write_validation,
)
from hyvideo.validation.reward_hacking import after_validation

BASE = {
    "reward": (1.4, 0.27),
    "held_out/exposure": (0.4, 0.1),
    "held_out/motion": (0.02, 0.005),
    "held_out/frozen": (0.0, 0.0),
    "true/VQ": (0.8, 0.1),
}


def validation(iteration, count=96, **changes):
    """Return a validation with the means of the base, plus ``changes`` in base standard
    deviations.
    """
    means = {name: mean for name, (mean, _) in BASE.items()}
    spreads = {name: Dispersion(std, count) for name, (_, std) in BASE.items()}
    for key, by in changes.items():
        (name,) = (metric for metric in BASE if metric.rpartition("/")[2] == key)
        means[name] += by * (BASE[name][1] or 1)
    return ValidationStats(iteration, means, spreads)


def find_shifts(history, threshold):
    return held_out.judge(history, threshold).departures


def judge(*history, threshold=1.5):
    return [shift.name for shift in find_shifts(history, threshold)]


def transfer(history, weights):
    return held_out.judge(history, 1.5, weights).transfer


def test_an_honest_improvement_raises_no_alarm():
    assert (
        judge(
            validation(0),
            validation(10, reward=1, VQ=1.2),
            validation(20, reward=2, VQ=3, exposure=0.5),
        )
        == []
    )


def test_a_rising_reward_with_a_falling_true_reward_is_reported_with_numbers():
    history = [validation(0), validation(10, reward=2, VQ=-3)]
    (shift,) = find_shifts(history, 1.5)
    assert shift.name == "true/VQ" and shift.shift == pytest.approx(-3)
    assert shift.base == 0.8 and shift.now == pytest.approx(0.5)
    text = held_out.judge(history, 1.5).reason
    assert (
        "iteration 10" in text
        and "(+2.00 base std" in text
        and "true/VQ 0.8 -> 0.5 (-3.00 base std" in text
    )


def test_a_shift_without_a_rising_reward_is_not_hacking():
    assert judge(validation(0), validation(10, reward=0.2, VQ=-3)) == []
    assert judge(validation(0), validation(10, reward=-2, VQ=-3)) == []


@pytest.mark.parametrize("by", [-2, 2])
def test_exposure_and_motion_are_bad_in_both_directions(by):
    assert judge(validation(0), validation(10, reward=1, exposure=by)) == ["held_out/exposure"]
    assert judge(validation(0), validation(10, reward=1, motion=by)) == ["held_out/motion"]


def test_the_largest_shift_comes_first_and_the_threshold_is_in_base_standard_deviations():
    moved = validation(10, reward=1, exposure=2, VQ=-4)
    assert judge(validation(0), moved) == ["true/VQ", "held_out/exposure"]
    assert judge(validation(0), moved, threshold=3) == ["true/VQ"]
    assert judge(validation(0), moved, threshold=5) == []


def test_a_base_without_spread_has_a_lower_bound_on_its_spread():
    def frozen(share):
        now = validation(10, reward=1)
        return ValidationStats(10, now.means | {"held_out/frozen": share}, now.spreads)

    assert judge(validation(0), frozen(0.1)) == []
    assert judge(validation(0), frozen(0.5)) == ["held_out/frozen"]


def test_a_metric_of_the_whole_set_is_not_compared():
    """It depends on the number of videos, and has no spread: the Fréchet distance of 12 clean videos
    is six times that of 96.
    """

    def with_distance(stats, value):
        return ValidationStats(
            stats.iteration, stats.means | {"frechet_distance": value}, stats.spreads
        )

    base = with_distance(validation(0), 0.01)
    assert judge(base, with_distance(validation(10, reward=2), 0.06)) == []


@pytest.mark.parametrize("counts, stops", [((16, 16), True), ((15, 96), False), ((96, 15), False)])
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_few_videos_do_not_stop_a_run(tmp_path, mesh, counts, stops, action):
    settings = ValidationSettings(on_reward_hacking=action)
    base, now = validation(0, counts[0]), validation(10, counts[1], reward=3, VQ=-9)
    (tmp_path / "samples" / "000000").mkdir(parents=True)
    write_validation(tmp_path / "samples" / "000000", base, held_out.Verdict(), {})
    verdict = after_validation(now, tmp_path / "samples", {}, settings, mesh, weights={})
    assert verdict.metrics["validation/hacking"] == 1
    assert verdict.ends_run is (stops and action == "stop")


@pytest.mark.parametrize("freedom", [3, 30])
def test_student_quantile_is_a_tight_bound(freedom):
    """By quadrature, its tail probability is at most that of a normal variable above 4, and close
    to it.
    """
    x = np.linspace(math.atan(student_quantile(4.0, freedom)), math.pi / 2, 20001)[:-1]
    log_norm = (
        math.lgamma((freedom + 1) / 2)
        - math.lgamma(freedom / 2)
        - 0.5 * math.log(freedom * math.pi)
    )
    density = (
        np.exp(log_norm - (freedom + 1) / 2 * np.log1p(np.tan(x) ** 2 / freedom)) / np.cos(x) ** 2
    )
    share = np.trapezoid(density, x) / (1 - statistics.NormalDist().cdf(4.0))
    assert (0.9 if freedom > 3 else 0.5) < share <= 1


# --- false alarms ---------------------------------------------------------------------------------

SMOOTH = [name for name in WATCHED if name.startswith("held_out/")] + [
    "true/VQ",
    "true/MQ",
    "true/TA",
]
MARKS = ["color_correct", "shape_correct", "direction_correct", "all_correct"]
VALIDATIONS = 10
KINDS = {
    "normal": lambda rng, shape: rng.normal(1, 0.25, shape),
    "skewed": lambda rng, shape: rng.lognormal(0, 0.7, shape),
    "marks": lambda rng, shape: 1.0 * (rng.random(shape) < np.linspace(0.5, 0.97, 14)[:, None]),
}


def rates(kind, count, shift=0.0, num_runs=400):
    """Return the fractions of runs and of validations that raise an alarm while the reward rises.

    Each validation has independent videos. Only the first metric moves, by ``shift`` base standard
    deviations.
    """
    names = [f"{number}_correct" for number in range(14)] if kind == "marks" else SMOOTH + MARKS
    rng = np.random.default_rng(count)
    values = KINDS[kind](rng, (num_runs, 1 + VALIDATIONS, len(names), count))
    means, stds = values.mean(-1), values.std(-1)
    means[:, 1:, 0] += shift * stds[:, :1, 0]
    error = np.sqrt((stds[:, :1] ** 2 + stds[:, 1:] ** 2) / (count - 1))
    moved = np.abs(means[:, 1:] - means[:, :1]) > np.maximum(1.5 * stds[:, :1], 4 * error)
    fired = np.zeros((num_runs, VALIDATIONS), bool)

    def stats(run, place):
        all_means = dict(zip(names, means[run, place])) | {"reward": 9.0 if place else 0.0}
        spreads = {name: Dispersion(std, count) for name, std in zip(names, stds[run, place])}
        return ValidationStats(place, all_means, spreads | {"reward": Dispersion(1.0, count)})

    for run, number in zip(*moved.any(-1).nonzero()):  # no metric of the others is far enough
        fired[run, number] = bool(find_shifts([stats(run, 0), stats(run, number + 1)], 1.5))
    return fired.any(1).mean(), fired.mean()


@pytest.mark.slow
@pytest.mark.parametrize("count, least, most", [(8, 0.0, 0.5), (32, 1.0, 1.0), (96, 1.0, 1.0)])
def test_clean_runs_raise_few_alarms_and_a_shift_is_found(count, least, most):
    """The rates of docs/judge_a_run.md: of clean runs of 10 validations with an alarm, and of shifts
    of 2.5 standard deviations that are found.
    """
    assert max(rates(kind, count)[0] for kind in KINDS) < 0.01
    _, found = rates("normal", count, shift=2.5, num_runs=100)
    assert least <= found <= most


def test_the_allowed_shift_grows_with_few_videos():
    assert judge(validation(0), validation(10, reward=1, exposure=1.6)) == ["held_out/exposure"]
    assert judge(validation(0, count=8), validation(10, count=8, reward=1, exposure=2.9)) == []
    assert judge(validation(0, count=8), validation(10, count=8, reward=1, exposure=3.1)) == [
        "held_out/exposure"
    ]
    assert judge(validation(0, count=3), validation(10, count=3, reward=99, exposure=99)) == []


def test_missing_values_raise_no_alarm():
    now = validation(10, reward=1, VQ=-3)
    unknown = ValidationStats(10, now.means | {"true/VQ": math.nan}, now.spreads)
    assert judge(validation(0), unknown) == []
    assert (
        judge(validation(0), ValidationStats(10, now.means | {"reward": math.nan}, now.spreads))
        == []
    )
    other = ValidationStats(
        10, now.means | {"new": 3.0}, now.spreads | {"new": Dispersion(1.0, 96)}
    )
    assert judge(validation(0), other) == ["true/VQ"]


# --- transfer -------------------------------------------------------------------------------------


def stats(iteration, means, std=0.2):
    return ValidationStats(iteration, means, {name: Dispersion(std, 32) for name in means})


def test_transfer_is_the_share_of_the_gain_that_the_true_reward_has():
    base = stats(0, {"reward": 1.4, "true/VQ": 0.5, "true/TA": 0.6})
    now = stats(9, {"reward": 1.7, "true/VQ": 0.6, "true/TA": 0.65})
    weights = {"VQ": 0.5, "TA": 1.0, "MQ": 0.0}
    assert transfer([base, now], weights) == pytest.approx((0.5 * 0.1 + 0.05) / 0.3)
    assert math.isnan(transfer([base, now], weights | {"MQ": 1.0}))  # its true value is not known
    assert math.isnan(transfer([base], weights))
    # no gain
    assert math.isnan(transfer([base, stats(9, dict(now.means) | {"reward": 1.41})], weights))


def test_transfer_of_held_out_scorers_compares_standard_deviations():
    base = stats(
        0,
        {
            "reward": 1.0,
            "held_out/motion": 0.1,
            "held_out/clip/CLIPScore": 20.0,
            "held_out/pick/P": 3.0,
        },
    )
    spreads = dict(base.spreads) | {"held_out/clip/CLIPScore": Dispersion(4.0, 32)}
    base = ValidationStats(0, base.means, spreads)
    now = stats(
        9,
        dict(base.means) | {"reward": 1.4, "held_out/motion": 0.9, "held_out/clip/CLIPScore": 22.0},
    )
    assert transfer([base, now], {"VQ": 1.0}) == pytest.approx((0.5 + 0.0) / 2 / 2.0)


@pytest.mark.parametrize("true_now, is_warned", [(0.51, True), (0.55, False)])
@pytest.mark.parametrize("warns", [True, False])
def test_a_run_with_reward_gradients_warns_of_a_gain_that_does_not_transfer(
    tmp_path, mesh, capsys, true_now, is_warned, warns
):
    samples = tmp_path / "samples"
    base = stats(0, {"reward": 1.4, "true/VQ": 0.5})
    (samples / "000000").mkdir(parents=True)
    write_validation(samples / "000000", base, held_out.Verdict(), {})
    verdict = after_validation(
        stats(9, {"reward": 1.5, "true/VQ": true_now}),
        samples,
        {},
        ValidationSettings(),
        mesh,
        weights={"VQ": 1.0},
        warns_of_transfer=warns,
    )
    assert verdict.metrics["hacking/transfer"] == pytest.approx((true_now - 0.5) / 0.1)
    assert ("10%" in capsys.readouterr().err) == (is_warned and warns)
