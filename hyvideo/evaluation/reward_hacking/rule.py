"""The rule for reward hacking: the reward went up, and something that it does not reward left the base policy's range.

    base    mean m_0 and spread s_0 over the n_0 validation videos of the policy before training
    now     m and s over the n videos of a later validation, same prompts and seeds
    error   e^2 = s_0^2 / (n_0 - 1) + s^2 / (n - 1), of m - m_0 between sets with nothing in common
    fires   m - m_0 of the reward      > max(0.25 s_0, e)
            and of a held-out measure  > max(threshold s_0, t e) in the direction that is bad, for one or more
            t as Student's with Welch's degrees of freedom, as rare as 4 errors of a normal variable: 3e-5 on a side

So a run of 10 validations and 14 measures that moves none of them fires in at most 1 of 100 (docs/reward_hacking.md has
the rates). A measure of the whole set has its base value for the unit s_0, and is compared between as many videos only.
Of three videos or fewer nothing is said; what fewer than 16 videos say ends no run.

Pure functions of numbers: all ranks that have the same history come to the same verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from hyvideo.config.sections import RecordSettings
from hyvideo.config.unused import FEWEST_TO_STOP
from hyvideo.data.outside import shown
from hyvideo.records.metrics_file import whole_lines

MARKER = "reward_hacking.json"  # in the folder of a run that ended for it
REWARD = "reward"
REWARD_RISE = 0.25  # base spreads: less is no success that could have been bought
ERRORS = 4.0
FEWEST_VIDEOS = 4  # below, nothing is said


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
SET_MEASURES = ("frechet_distance",)  # one number of all videos; how many they are moves it
NUM_PARTS = 16  # of a set, left out in turn for the error of its measure


@dataclass(frozen=True)
class ValidationStats:
    """The numbers of one validation, by measure."""

    iteration: int
    means: Mapping[str, float]
    spreads: Mapping[str, Dispersion] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricShift:
    """The distance of a measure from the base's."""

    name: str
    base: float
    now: float
    shift: float  # in spreads of the base
    allowed: float

    @property
    def is_bad(self) -> bool:
        """Claims that the measure left the base's range in its bad direction."""
        bad = WATCHED.get(self.name, OTHER_METRIC).bad
        return {"up": self.shift, "down": -self.shift, "either": abs(self.shift)}[bad] > self.allowed

    def __str__(self) -> str:
        return f"{self.name} {self.base:.3g} -> {self.now:.3g} ({self.shift:+.2f} base std, {self.allowed:.2f} allowed)"


def base_stats(history: Sequence[ValidationStats]) -> ValidationStats | None:
    """The validation of the policy before training, if it was recorded with the spread of its reward."""
    return next((stats for stats in history if stats.iteration == 0 and REWARD in stats.spreads), None)


def find_shifts(history: Sequence[ValidationStats], threshold: float) -> list[MetricShift]:
    """Measures that left the base's range, ``threshold`` spreads, in the last validation while the reward rose."""
    base, now = base_stats(history), history[-1]
    if base is None or base is now:
        return []
    error, _ = _error(REWARD, base, now)
    spread = base.spreads[REWARD].std
    if not (spread > 0 and _difference(REWARD, base, now) > max(REWARD_RISE * spread, error)):
        return []
    return sorted((each for each in all_shifts(base, now, threshold) if each.is_bad), key=lambda each: -abs(each.shift))


def all_shifts(base: ValidationStats, now: ValidationStats, threshold: float) -> list[MetricShift]:
    """Shifts of all measures but the reward that can be compared with the base's, whatever the reward did."""
    shifts = []
    for name in now.means:
        watched = WATCHED.get(name, OTHER_METRIC)
        unit = _unit(name, base, watched) if name in base.spreads else 0.0
        if name == REWARD or not unit > 0 or name in other_sets(base, now):
            continue
        error, student = _error(name, base, now)
        shift, allowed = _difference(name, base, now) / unit, max(threshold, student * error / unit)
        shifts.append(MetricShift(name, base.means[name], now.means[name], shift, allowed))
    return shifts


def other_sets(base: ValidationStats, now: ValidationStats) -> dict[str, tuple[int, int]]:
    """Measures of the whole set that cannot be compared, with their numbers of videos: they are not as many as then."""
    counts = {name: (_count(name, base), _count(name, now)) for name in SET_MEASURES}
    measured = base.means.keys() & now.means.keys()
    return {name: (before, after) for name, (before, after) in counts.items() if before != after and name in measured}


def may_stop(base: ValidationStats, now: ValidationStats) -> bool:
    """Claims that both have enough videos to end a run by."""
    return min(_count(REWARD, base), _count(REWARD, now)) >= FEWEST_TO_STOP


def student_quantile(deviate: float, freedom: float) -> float:
    """The value that Student's t exceeds at most as often as a normal variable ``deviate`` (Wallace, 1959)."""
    scaled = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled**2 / freedom))


def describe(history: Sequence[ValidationStats], shifts: Sequence[MetricShift]) -> str:
    """One line with the reward's rise and every shift with its numbers."""
    base, now = base_stats(history), history[-1]
    rise = _difference(REWARD, base, now) / base.spreads[REWARD].std
    return (
        f"reward hacking at iteration {now.iteration}: reward {base.means[REWARD]:.3g} -> {now.means[REWARD]:.3g} "
        f"({rise:+.2f} base std) while " + ", ".join(map(str, shifts))
    )


def _difference(name: str, base: ValidationStats, now: ValidationStats) -> float:
    difference = now.means.get(name, math.nan) - base.means.get(name, math.nan)
    return difference if math.isfinite(difference) else math.nan


def _unit(name: str, base: ValidationStats, watched: WatchedMetric) -> float:
    """Size of a shift of one spread."""
    value = abs(base.means.get(name, math.nan))
    return max(value if name in SET_MEASURES else base.spreads[name].std, watched.least_spread, RELATIVE_LEAST * value)


def _count(name: str, stats: ValidationStats) -> int:
    return stats.spreads[name].count if name in stats.spreads else 0


def _error(name: str, base: ValidationStats, now: ValidationStats) -> tuple[float, float]:
    """Standard error of the difference of two means, and how many of them chance explains; infinite for few videos."""
    if min(_count(name, base), _count(name, now)) < FEWEST_VIDEOS:
        return math.inf, ERRORS
    sets = base.spreads[name], now.spreads[name]
    # Two sets without spread, such as of marks that are all 1 and all 0: what they have together.
    alike = abs(_difference(name, base, now)) / 2 if not any(one.std for one in sets) else 0.0
    most = NUM_PARTS if name in SET_MEASURES else math.inf  # numbers that an error was made of
    parts = [((one.std or alike) ** 2 / (one.count - 1), min(one.count, most) - 1) for one in sets]
    variance = sum(part for part, _ in parts)
    if not variance > 0:
        return 0.0, ERRORS
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)  # Welch
    return math.sqrt(variance), student_quantile(ERRORS, freedom)


def check_output_dir(settings: RecordSettings) -> None:
    """Raises ValueError where ``output_dir`` holds a run that this one does not resume, or that ended for good."""
    path = Path(settings.output_dir) / "metrics.jsonl"
    if not path.exists() or path.stat().st_size == 0:
        return
    if not settings.resume_from_checkpoint:
        raise ValueError(
            f"output_dir {shown(settings.output_dir)} already holds a run; go on with it by --resume_from_checkpoint "
            "latest, or name another output_dir"
        )
    whole_lines(path)
    marker = path.with_name(MARKER)
    if settings.on_reward_hacking != "warn" and marker.is_file():
        raise ValueError(
            f"the run in output_dir {shown(settings.output_dir)} ended for reward hacking and would do so again; "
            f"docs/reward_hacking.md says what to change; to go on, delete {marker} or take on_reward_hacking warn"
        )
