"""Held-out metrics of a validation, which are never rewarded, and the rule that compares them with the
base model: a run shows reward hacking if its reward rose while one of them left the base model's
range.

Over-exposure, saturated color, frozen motion, grids and blur can raise a learned reward without
improving the video, so `held_out_metrics` measures the pixels. Scorers add metrics of their own, and
every score without a weight is one. Imports no torch.

    base    mean m_0 and standard deviation s_0 over the n_0 validation videos of the base model
    now     m and s over the n videos of a later validation, same prompts and seeds
    error   e^2 = s_0^2 / (n_0 - 1) + s^2 / (n - 1), of m - m_0 for independent sets of videos
    fires   m - m_0 of the reward      > max(0.25 s_0, e)
            and of a held-out metric   > max(threshold s_0, t e) in its bad direction, for one or more metrics
            t: Student's quantile, Welch's degrees of freedom, at the tail of 4 normal standard deviations (3e-5)

Fewer than 4 videos give no verdict; fewer than 16 never stop a run. docs/judge_a_run.md#reward-hacking
has the rates of false alarms.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from hyvideo.files.files import read_text
from hyvideo.files.run_folder import numbered
from hyvideo.records.run_files import or_none, write_json

MEASURES_FILE = "measures.json"
REWARD = "reward"

REWARD_RISE = 0.25  # base standard deviations; a smaller rise is not a sign of hacking
ERRORS = 4.0  # standard errors
MIN_VIDEOS = 4  # fewer give no verdict
MIN_RELATIVE = 0.02  # lower bound on the base standard deviation, as a fraction of the base mean
# share of the reward's gain that other measures see; a run with reward gradients warns below it
MIN_TRANSFER = 1 / 3


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
}
# Other scores of each video: true rewards, CLIPScore, a dimension without weight.
OTHER_METRIC = WatchedMetric("down")


# --- metrics of a validation ----------------------------------------------------------------------


class Dispersion(NamedTuple):
    """Standard deviation of a metric over the videos of a validation, or over the prompts for
    diversity.
    """

    std: float
    count: int


@dataclass(frozen=True)
class ValidationStats:
    """Means and spreads of one validation, by metric."""

    iteration: int
    means: Mapping[str, float]
    spreads: Mapping[str, Dispersion] = field(default_factory=dict)  # not of the whole set


# --- rule -----------------------------------------------------------------------------------------


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
        toward_bad = {"up": self.shift, "down": -self.shift, "either": abs(self.shift)}[bad]
        return toward_bad / self.allowed

    @property
    def is_bad(self) -> bool:
        """Return whether the metric left the base model's range in its bad direction."""
        return self.used > 1

    def __str__(self) -> str:
        return (
            f"{self.name} {self.base:.3g} -> {self.now:.3g} ({self.shift:+.2f} base std, "
            f"{self.allowed:.2f} allowed)"
        )


@dataclass(frozen=True)
class Verdict:
    """What a validation says in comparison with that of the base model."""

    shifts: list[MetricShift] = field(default_factory=list)  # of all metrics but the reward
    # the bad ones if the reward rose, the largest first
    departures: list[MetricShift] = field(default_factory=list)
    reason: str = ""  # the reward hacking in one line; empty without
    # share of the reward's gain that what is not trained on sees; NaN if unknown
    transfer: float = math.nan
    has_base: bool = False  # whether there is a validation of the base model
    ends_run: bool = False

    @property
    def metrics(self) -> dict[str, float]:
        hacking = float(bool(self.departures)) if self.has_base else math.nan
        return {"validation/hacking": hacking, "hacking/transfer": self.transfer}


def base_stats(history: Sequence[ValidationStats]) -> ValidationStats | None:
    """Return the validation of the base model, or None if it was not recorded with the spread of
    its reward.
    """
    return next(
        (stats for stats in history if stats.iteration == 0 and REWARD in stats.spreads), None
    )


def judge(
    history: Sequence[ValidationStats],
    threshold: float,
    weights: Mapping[str, float] | None = None,  # of the reward's dimensions
) -> Verdict:
    """Return what the rule says of the last validation."""
    base = base_stats(history)
    now = history[-1]
    if base is None:
        return Verdict()
    shifts = all_shifts(base, now, threshold)
    if base is now or not _has_risen(base, now):
        return Verdict(shifts, has_base=True)
    bad = sorted((each for each in shifts if each.is_bad), key=lambda each: -abs(each.shift))
    reason = ""
    if bad:
        rise = _difference(REWARD, base, now) / base.spreads[REWARD].std
        reason = (
            f"reward hacking at iteration {now.iteration}: reward {base.means[REWARD]:.3g} -> "
            f"{now.means[REWARD]:.3g} ({rise:+.2f} base std) while " + ", ".join(map(str, bad))
        )
    return Verdict(shifts, bad, reason, transfer(base, now, weights or {}), has_base=True)


def transfer(base: ValidationStats, now: ValidationStats, weights: Mapping[str, float]) -> float:
    """Return the share of the reward's gain since the base model that is also seen by what is not
    trained on.

    With the true value ``true/<dimension>`` of each weighted dimension, that is the gain of their
    weighted sum divided by the gain of the reward. Otherwise it is the mean gain of the held-out
    scorers' dimensions, ``held_out/<scorer>/<dimension>``, divided by the gain of the reward, each
    in standard deviations of the base model. NaN without either.
    """
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


def all_shifts(base: ValidationStats, now: ValidationStats, threshold: float) -> list[MetricShift]:
    """Return the shifts of all metrics that can be compared with the base model, except the
    reward.
    """
    shifts = []
    for name in now.means:
        if name == REWARD or name not in base.spreads:
            continue
        least = WATCHED.get(name, OTHER_METRIC).min_spread
        value = abs(base.means.get(name, math.nan))
        unit = max(base.spreads[name].std, least, MIN_RELATIVE * value)
        if not unit > 0:
            continue
        error, student = _error(name, base, now)
        shift = _difference(name, base, now) / unit
        allowed = max(threshold, student * error / unit)
        shifts.append(MetricShift(name, base.means[name], now.means[name], shift, allowed))
    return shifts


def student_quantile(deviate: float, freedom: float) -> float:
    """Return a bound on Student's t quantile at the probability of the normal quantile ``deviate``
    (Wallace 1959).
    """
    scaled = deviate * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(scaled**2 / freedom))


def _has_risen(base: ValidationStats, now: ValidationStats) -> bool:
    """Return whether the reward has risen significantly since the base model."""
    error, _ = _error(REWARD, base, now)
    spread = base.spreads[REWARD].std
    return spread > 0 and _difference(REWARD, base, now) > max(REWARD_RISE * spread, error)


def _difference(name: str, base: ValidationStats, now: ValidationStats) -> float:
    difference = now.means.get(name, math.nan) - base.means.get(name, math.nan)
    return difference if math.isfinite(difference) else math.nan


def count_of(name: str, stats: ValidationStats) -> int:
    """Return of how many videos, or prompts for diversity, a validation has a metric."""
    return stats.spreads[name].count if name in stats.spreads else 0


def _error(name: str, base: ValidationStats, now: ValidationStats) -> tuple[float, float]:
    """Return the standard error of the difference of two means, infinite for few videos, and its
    Student factor.
    """
    if min(count_of(name, base), count_of(name, now)) < MIN_VIDEOS:
        return math.inf, ERRORS
    sets = base.spreads[name], now.spreads[name]
    # If neither set has a spread (all scores were 1 and are now 0, for example), use that of both
    # together.
    pooled = 0.0
    if not any(spread.std for spread in sets):
        pooled = abs(_difference(name, base, now)) / 2
    parts = [
        ((spread.std or pooled) ** 2 / (spread.count - 1), spread.count - 1) for spread in sets
    ]
    variance = sum(part for part, _ in parts)
    if not variance > 0:
        return 0.0, ERRORS
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)  # Welch
    return math.sqrt(variance), student_quantile(ERRORS, freedom)


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


# --- records --------------------------------------------------------------------------------------


def read_history(
    samples: Path, made_with: Mapping[str, object], *, before: int
) -> list[ValidationStats]:
    """Return the recorded validations of earlier iterations with the same settings, in order."""
    folders = [path for number, path in numbered(samples.parent, samples.name) if number < before]
    validations = [read_validation(path, made_with) for path in folders]
    return [stats for stats in validations if stats is not None]


def read_validation(folder: Path, made_with: Mapping[str, object]) -> ValidationStats | None:
    """Return a recorded validation, NaN for missing values, or None if unreadable or made with
    other settings.
    """
    path = folder / MEASURES_FILE
    try:
        recorded = json.loads(read_text(path))
        pairs = recorded["spreads"].items()
        spreads = {name: Dispersion(float(std), int(count)) for name, (std, count) in pairs}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        warn(f"{path} cannot be read ({error}): the validation is treated as missing")
        return None
    if recorded["made_with"] != made_with:
        return None
    means = {}
    for name, value in recorded.items():
        if value is None:
            means[name] = math.nan
        elif isinstance(value, (int, float)):
            means[name] = value
    return ValidationStats(int(folder.name), means, spreads)


def write_validation(
    folder: Path, stats: ValidationStats, verdict: Verdict, made_with: Mapping[str, object]
) -> None:
    """Write measures.json: means, spreads as [std, count], departures, and the settings of the
    validation.
    """
    means = {name: or_none(value) for name, value in stats.means.items()}
    others = {
        "spreads": stats.spreads,
        "hacking": [asdict(shift) for shift in verdict.departures],
        "made_with": made_with,
    }
    write_json(folder / MEASURES_FILE, means | others)
