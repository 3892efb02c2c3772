"""The rule for reward hacking: the reward went up, and something that it does not reward left the base policy's range.

    base    mean m_0 and spread s over the n_0 validation videos of the policy before training
    shift   (m - m_0) / s of a later validation, same prompts and seeds, n videos
    fires   shift of the reward        > max(0.25, e)
            and of a held-out measure  > max(threshold, 3 e) in the direction that is bad, for one or more
            e = sqrt((1/n_0 + 1/n) n_0 / (n_0 - 3)), the standard error of a shift between sets with nothing in
            common, s being known from n_0 videos only; of three videos or fewer nothing is said

Pure functions of numbers: all ranks that have the same history come to the same verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hyvideo.config.sections import RecordSettings
from hyvideo.records.run_folder import check_run_folder

MARKER = "reward_hacking.json"  # in the folder of a run that ended for it
REWARD = "reward"
REWARD_RISE = 0.25  # base spreads: less is no success that could have been bought
ERRORS = 3.0


class RewardHacking(RuntimeError):
    """The run ended because its reward rose while what is not rewarded got worse."""


class Dispersion(NamedTuple):
    """Spread of a measure over the videos of a validation, or over the prompts for diversity."""

    std: float
    count: int


class WatchedMetric(NamedTuple):
    """Direction in which a measure is bad, and the smallest spread that is believed of a base of like videos."""

    bad: Literal["up", "down", "either"]
    least_spread: float = 0.0


WATCHED = {
    "held_out/exposure": WatchedMetric("either", 0.02),
    "held_out/saturation": WatchedMetric("either", 0.02),
    "held_out/clipped": WatchedMetric("up", 0.02),
    "held_out/motion": WatchedMetric("either", 0.002),
    "held_out/sharpness": WatchedMetric("either", 0.001),
    "held_out/frozen": WatchedMetric("up", 0.1),
    "held_out/diversity": WatchedMetric("down", 0.005),
    "frechet_distance": WatchedMetric("up"),
}
# What a scorer says of each video: true measures, CLIPScore, a dimension without weight.
OTHER_METRIC = WatchedMetric("down")
RELATIVE_LEAST = 0.02  # of the base's mean: no spread of a held-out measure is believed to be smaller
SET_MEASURES = ("frechet_distance",)  # one number of all videos: its unit is the base's value


@dataclass(frozen=True)
class ValidationStats:
    """The numbers of one validation, by measure."""

    iteration: int
    means: Mapping[str, float]
    spreads: Mapping[str, Dispersion] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricShift:
    """A measure that left the base's range."""

    name: str
    base: float
    now: float
    shift: float  # in spreads of the base
    allowed: float

    def __str__(self) -> str:
        return f"{self.name} {self.base:.3g} -> {self.now:.3g} ({self.shift:+.2f} spreads, {self.allowed:.2f} allowed)"


def base_stats(history: Sequence[ValidationStats]) -> ValidationStats | None:
    """The validation of the policy before training, if it was recorded with the spread of its reward."""
    return next((stats for stats in history if stats.iteration == 0 and REWARD in stats.spreads), None)


def find_shifts(history: Sequence[ValidationStats], threshold: float) -> list[MetricShift]:
    """Measures that left the base's range while the reward rose, in the last validation; none without the base's.

    Args:
        threshold: Spreads of the base that a measure may move.
    """
    base, now = base_stats(history), history[-1]
    if base is None or base is now:
        return []
    if not _rise(base, now) > max(REWARD_RISE, _standard_error(REWARD, base, now)):
        return []
    shifts = []
    for name in now.means:
        watched = WATCHED.get(name, OTHER_METRIC)
        if name == REWARD or not (name in base.spreads or name in SET_MEASURES):
            continue
        shift = _shift(name, base, now, watched)
        allowed = max(threshold, ERRORS * _standard_error(name, base, now))
        badness = {"up": shift, "down": -shift, "either": abs(shift)}[watched.bad]
        if badness > allowed:
            shifts.append(MetricShift(name, base.means[name], now.means[name], shift, allowed))
    return sorted(shifts, key=lambda metric: -abs(metric.shift))


def describe(history: Sequence[ValidationStats], shifts: Sequence[MetricShift]) -> str:
    """One line with the reward's rise and every shift with its numbers."""
    base, now = base_stats(history), history[-1]
    return (
        f"reward hacking at iteration {now.iteration}: reward {base.means[REWARD]:.3g} -> {now.means[REWARD]:.3g} "
        f"({_rise(base, now):+.2f} spreads of the base) while " + ", ".join(map(str, shifts))
    )


def _rise(base: ValidationStats, now: ValidationStats) -> float:
    """Rise of the reward in spreads of the base; its zero may lie anywhere, so its mean says nothing of its spread."""
    return _ratio(now.means.get(REWARD, math.nan) - base.means[REWARD], base.spreads[REWARD].std)


def _shift(name: str, base: ValidationStats, now: ValidationStats, watched: WatchedMetric) -> float:
    """Shift of a measure in spreads of the base; NaN where that is no number."""
    before, after = base.means.get(name, math.nan), now.means[name]
    std = abs(before) if name in SET_MEASURES else base.spreads[name].std
    return _ratio(after - before, max(std, watched.least_spread, RELATIVE_LEAST * abs(before)))


def _ratio(difference: float, unit: float) -> float:
    return difference / unit if unit > 0 and math.isfinite(difference) else math.nan


def _standard_error(name: str, base: ValidationStats, now: ValidationStats) -> float:
    """Standard error of a shift; 0 for a measure of the whole set."""
    if name in SET_MEASURES:
        return 0.0
    before, after = (stats.spreads[name].count if name in stats.spreads else 0 for stats in (base, now))
    if before <= 3 or after == 0:
        return math.inf
    return math.sqrt((1 / before + 1 / after) * before / (before - 3))


def check_output_dir(settings: RecordSettings) -> None:
    """Raises ValueError where ``output_dir`` holds a run that this one must not write into."""
    end_marker = MARKER if settings.on_reward_hacking != "warn" else None
    check_run_folder(settings.output_dir, resumes=bool(settings.resume_from_checkpoint), end_marker=end_marker)
