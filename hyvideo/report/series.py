"""Metrics of a run for the page: thinned curves, and totals over all iterations.

A page of 50 runs of 10,000 iterations must stay small, so that a point of a curve stands for
several iterations: their mean, or their maximum for metrics that are watched for outliers. Totals
and warnings use every iteration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hyvideo.records.metric_table import is_peak
from hyvideo.records.run_files import evenly_spaced

SPIKE = 10.0  # gradient norm divided by its recent median
# of a heat map of lists, such as metrics by denoising step, however many runs there are
MIN_COLUMNS = 40
DIGITS = 5  # significant digits of a point
LIST_DIGITS = 3


@dataclass(frozen=True)
class Total:
    """Sum, mean and maximum of a metric over all iterations that have it."""

    sum: float
    mean: float
    largest: float


@dataclass(frozen=True)
class Series:
    """Metrics of all iterations of a run."""

    num_iterations: int  # lines of metrics.jsonl
    last: int  # last iteration; 0 without any
    per_point: int  # iterations that a point of a curve stands for
    # by metric, one value per point; "iteration" has the last iteration of each point
    points: dict[str, list]
    columns: dict[str, list]  # lists by metric, thinned; "iteration" has the iteration of each
    totals: dict[str, Total]  # by metric
    restarts: list[int]  # iterations before which the run was restarted
    spikes: list[int]  # iterations with a spike of the gradient norm
    seconds: float  # of all iterations, without validations and checkpoints

    def total(self, name: str) -> float:
        """Return the sum of a metric, 0 if the run does not have it."""
        return self.totals[name].sum if name in self.totals else 0.0


def read_series(lines: Sequence[dict], max_points: int) -> Series:
    """Return the series of the lines of metrics.jsonl, with at most ``max_points`` points in a
    curve.
    """
    columns, lists = _columns_of(lines)
    # None becomes NaN
    values = {name: np.array(column, dtype=float) for name, column in columns.items()}
    iterations = [line["iteration"] for line in lines]
    per_point = max(1, math.ceil(len(lines) / max_points))
    ends = []
    if lines:
        ends = [*range(per_point, len(lines), per_point), len(lines)]
    points = {name: _thin(each, ends, is_peak=is_peak(name)) for name, each in values.items()}
    points["iteration"] = [iterations[end - 1] for end in ends]
    spikes = values.get("grad/spike", np.zeros(len(lines)))
    return Series(
        num_iterations=len(lines),
        last=iterations[-1] if lines else 0,
        per_point=per_point,
        points=points,
        columns=_thin_lists(iterations, lists, max(MIN_COLUMNS, max_points // 3)),
        totals={name: _total(each) for name, each in values.items() if np.isfinite(each).any()},
        restarts=_restarts(lines),
        spikes=[iteration for iteration, spike in zip(iterations, spikes) if spike > SPIKE],
        seconds=float(sum(line["time/iteration"] for line in lines)),
    )


def _columns_of(lines: Sequence[dict]) -> tuple[dict[str, list], dict[str, list]]:
    """Return the values of each metric in all lines: metrics that are numbers, and metrics that are
    lists.
    """
    numbers = {}
    lists = {}
    for name in dict.fromkeys(chain.from_iterable(lines)):
        column = [line.get(name) for line in lines]
        first = next((value for value in column if value is not None), None)
        if isinstance(first, list):
            lists[name] = column
        elif isinstance(first, int | float) or first is None:
            numbers[name] = column
    return numbers, lists


def _rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """Return a number with few digits, as an integer if it is one; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _thin(values: np.ndarray, ends: Sequence[int], *, is_peak: bool) -> list[float | None]:
    """Return the mean or the maximum of the finite values between two ends, None without any; the
    first begins at 0.
    """
    found = []
    start = 0
    for end in ends:
        part = values[start:end]
        part = part[np.isfinite(part)]
        start = end
        if not part.size:
            found.append(None)
        elif is_peak:
            found.append(_rounded(float(part.max())))
        else:
            found.append(_rounded(float(part.mean())))
    return found


def _total(values: np.ndarray) -> Total:
    known = values[np.isfinite(values)]
    return Total(sum=float(known.sum()), mean=float(known.mean()), largest=float(known.max()))


def _thin_lists(
    iterations: Sequence[int], lists: dict[str, list], max_columns: int
) -> dict[str, list]:
    """Return the metrics that are lists, of evenly spaced iterations and the last one."""
    if not lists:
        return {}
    rows = [*evenly_spaced(max_columns - 1, len(iterations) - 1), len(iterations) - 1]
    found: dict[str, list] = {"iteration": [iterations[row] for row in rows]}
    for name, column in lists.items():
        found[name] = [
            [_rounded(value, LIST_DIGITS) for value in column[row] or []] for row in rows
        ]
    return found


def _restarts(lines: Sequence[dict]) -> list[int]:
    """Return the iterations whose process is younger than at the iteration before."""
    found = []
    for before, line in zip(lines, lines[1:]):
        if "time/since_start" not in before or "time/since_start" not in line:
            continue
        if line["time/since_start"] - before["time/since_start"] < 0.9 * line["time/iteration"]:
            found.append(line["iteration"])
    return found
