"""Rule that detects reward hacking: the reward rose while a held-out metric left the base model's
range.

    base    mean m_0 and standard deviation s_0 over the n_0 validation videos of the base model
    now     m and s over the n videos of a later validation, same prompts and seeds
    error   e^2 = s_0^2 / (n_0 - 1) + s^2 / (n - 1), of m - m_0 for independent sets of videos
    fires   m - m_0 of the reward      > max(0.25 s_0, e)
            and of a held-out metric   > max(threshold s_0, t e) in its bad direction, for one or more metrics
            t: Student's quantile, Welch's degrees of freedom, at the tail of 4 normal standard deviations (3e-5)

For a metric of the whole set, s_0 is its base value, and it is compared only between equal numbers
of videos. Fewer than 4 videos give no verdict; fewer than 16 never stop a run.
docs/judge_a_run.md#reward-hacking has the rates of false alarms.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from hyvideo.checks.without_effect import MIN_VIDEOS_TO_STOP
from hyvideo.files.text import quote
from hyvideo.settings.sections import RecordSettings

MARKER = "reward_hacking.json"  # in the output_dir of a run that was stopped
REWARD = "reward"
REWARD_RISE = 0.25  # base standard deviations; a smaller rise is not a sign of hacking
ERRORS = 4.0  # standard errors
MIN_VIDEOS = 4  # fewer give no verdict
# share of the reward's gain that other measures see; a run with reward gradients warns below it
MIN_TRANSFER = 1 / 3


class RewardHacking(RuntimeError):
    """Raised to stop a run whose reward rose while a held-out metric degraded."""


class Dispersion(NamedTuple):
    """Standard deviation of a metric over the videos of a validation, or over the prompts for
    diversity.
    """

    std: float
    count: int


class WatchedMetric(NamedTuple):
    """Bad direction of a metric, and a lower bound on its base standard deviation."""

    bad: Literal["up", "down", "either"]
    min_spread: float = 0.0


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
# Other scores of each video: true rewards, CLIPScore, a dimension without weight.
OTHER_METRIC = WatchedMetric("down")
MIN_RELATIVE = 0.02  # lower bound on the base standard deviation, as a fraction of the base mean
SET_MEASURES = ("frechet_distance",)  # one value per set; it depends on the number of videos
NUM_PARTS = 16  # parts of a set for the jackknife


@dataclass(frozen=True)
class ValidationStats:
    """Means and spreads of one validation, by metric."""

    iteration: int
    means: Mapping[str, float]
    spreads: Mapping[str, Dispersion] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricShift:
    """Shift of a metric from its base value."""

    name: str
    base: float
    now: float
    shift: float  # in base standard deviations
    allowed: float

    @property
    def used(self) -> float:
        """Return the shift in the metric's bad direction as a fraction of the allowed one."""
        bad = WATCHED.get(self.name, OTHER_METRIC).bad
        return {"up": self.shift, "down": -self.shift, "either": abs(self.shift)}[
            bad
        ] / self.allowed

    @property
    def is_bad(self) -> bool:
        """Return whether the metric left the base model's range in its bad direction."""
        return self.used > 1

    def __str__(self) -> str:
        return (
            f"{self.name} {self.base:.3g} -> {self.now:.3g} ({self.shift:+.2f} base std, "
            f"{self.allowed:.2f} allowed)"
        )


def base_stats(history: Sequence[ValidationStats]) -> ValidationStats | None:
    """Return the validation of the base model, or None if it was not recorded with the spread of
    its reward.
    """
    return next(
        (stats for stats in history if stats.iteration == 0 and REWARD in stats.spreads), None
    )


def find_shifts(history: Sequence[ValidationStats], threshold: float) -> list[MetricShift]:
    """Return the bad shifts of the last validation if its reward rose, the largest first."""
    base = base_stats(history)
    now = history[-1]
    if base is None or base is now or not _has_risen(base, now):
        return []
    return sorted(
        (each for each in all_shifts(base, now, threshold) if each.is_bad),
        key=lambda each: -abs(each.shift),
    )


def transfer(history: Sequence[ValidationStats], weights: Mapping[str, float]) -> float:
    """Return the share of the reward's gain since the base model that is also seen by what is not
    trained on.

    With the true value ``true/<dimension>`` of each weighted dimension, that is the gain of their
    weighted sum divided by the gain of the reward. Otherwise it is the mean gain of the held-out
    scorers' dimensions, ``held_out/<scorer>/<dimension>``, divided by the gain of the reward, each
    in standard deviations of the base model. NaN without either, and if the reward has not risen as
    far as the rule for reward hacking requires.
    """
    base = base_stats(history)
    now = history[-1]
    if base is None or base is now or not _has_risen(base, now):
        return math.nan
    gain = _difference(REWARD, base, now)
    weights = {name: weight for name, weight in weights.items() if weight}
    if weights and all(f"true/{name}" in base.means for name in weights):
        true_gain = sum(
            weight * _difference(f"true/{name}", base, now) for name, weight in weights.items()
        )
        return true_gain / gain
    held_out = [
        name for name in base.spreads if name.startswith("held_out/") and name.count("/") == 2
    ]
    gains = [
        _difference(name, base, now) / base.spreads[name].std
        for name in held_out
        if base.spreads[name].std > 0
    ]
    if not gains:
        return math.nan
    return sum(gains) / len(gains) / (gain / base.spreads[REWARD].std)


def _has_risen(base: ValidationStats, now: ValidationStats) -> bool:
    """Return whether the reward has risen significantly since the base model."""
    error, _ = _error(REWARD, base, now)
    spread = base.spreads[REWARD].std
    return spread > 0 and _difference(REWARD, base, now) > max(REWARD_RISE * spread, error)


def all_shifts(base: ValidationStats, now: ValidationStats, threshold: float) -> list[MetricShift]:
    """Return the shifts of all metrics that can be compared with the base model, except the
    reward.
    """
    shifts = []
    for name in now.means:
        watched = WATCHED.get(name, OTHER_METRIC)
        if name == REWARD or name not in base.spreads:
            continue
        unit = _unit(name, base, watched)
        is_other_size = name in SET_MEASURES and _count(name, base) != _count(name, now)
        if not unit > 0 or is_other_size:
            continue
        error, student = _error(name, base, now)
        shift = _difference(name, base, now) / unit
        allowed = max(threshold, student * error / unit)
        shifts.append(MetricShift(name, base.means[name], now.means[name], shift, allowed))
    return shifts


def may_stop(base: ValidationStats, now: ValidationStats) -> bool:
    """Return whether both validations have enough videos to stop a run."""
    return min(_count(REWARD, base), _count(REWARD, now)) >= MIN_VIDEOS_TO_STOP


def student_quantile(deviate: float, freedom: float) -> float:
    """Return a bound on Student's t quantile at the probability of the normal quantile ``deviate``
    (Wallace 1959).
    """
    scaled = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled**2 / freedom))


def describe(history: Sequence[ValidationStats], shifts: Sequence[MetricShift]) -> str:
    """Return one line with the rise of the reward and every shift."""
    base = base_stats(history)
    now = history[-1]
    rise = _difference(REWARD, base, now) / base.spreads[REWARD].std
    return (
        f"reward hacking at iteration {now.iteration}: reward {base.means[REWARD]:.3g} -> "
        f"{now.means[REWARD]:.3g} ({rise:+.2f} base std) while " + ", ".join(map(str, shifts))
    )


def _difference(name: str, base: ValidationStats, now: ValidationStats) -> float:
    difference = now.means.get(name, math.nan) - base.means.get(name, math.nan)
    return difference if math.isfinite(difference) else math.nan


def _unit(name: str, base: ValidationStats, watched: WatchedMetric) -> float:
    """Return the base standard deviation of a metric, at least its lower bounds."""
    value = abs(base.means.get(name, math.nan))
    spread = value if name in SET_MEASURES else base.spreads[name].std
    return max(spread, watched.min_spread, MIN_RELATIVE * value)


def _count(name: str, stats: ValidationStats) -> int:
    return stats.spreads[name].count if name in stats.spreads else 0


def _error(name: str, base: ValidationStats, now: ValidationStats) -> tuple[float, float]:
    """Return the standard error of the difference of two means, infinite for few videos, and its
    Student factor.
    """
    if min(_count(name, base), _count(name, now)) < MIN_VIDEOS:
        return math.inf, ERRORS
    sets = base.spreads[name], now.spreads[name]
    # If neither set has a spread (all scores were 1 and are now 0, for example), use that of both
    # together.
    pooled = 0.0
    if not any(spread.std for spread in sets):
        pooled = abs(_difference(name, base, now)) / 2
    most = NUM_PARTS if name in SET_MEASURES else math.inf  # number of values behind the error
    parts = [
        ((spread.std or pooled) ** 2 / (spread.count - 1), min(spread.count, most) - 1)
        for spread in sets
    ]
    variance = sum(part for part, _ in parts)
    if not variance > 0:
        return 0.0, ERRORS
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)  # Welch
    return math.sqrt(variance), student_quantile(ERRORS, freedom)


def check_output_dir(settings: RecordSettings) -> None:
    """Raise ValueError if the run in ``output_dir`` was stopped for reward hacking."""
    marker = Path(settings.output_dir) / MARKER
    if settings.on_reward_hacking != "warn" and marker.is_file():
        raise ValueError(
            f"the run in output_dir {quote(settings.output_dir)} was stopped for reward hacking "
            "and would stop again; docs/judge_a_run.md#reward-hacking describes what to change; to resume, "
            f"delete {marker} or set on_reward_hacking warn"
        )
