"""Scores of runs, their intervals over seeds and prompts, and paired differences of two recipes
with verdicts.

Runs of the same seed share rollout noise, and all runs share the prompts and noise of the
evaluation. Intervals are those of the differences by seed and prompt, over the seeds that both
recipes have.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hyvideo.validation.intervals import Interval, in_range, t_interval
from studies.tables.table import format_interval, format_seeds

# of a run, by column: (prompts,), NaN if missing; (1,) for a metric of the whole set
Scores = dict[str, np.ndarray]
NO_CORRECTION = (
    "Without correction for multiple tests, about 1 in 20 null comparisons is flagged by chance."
)


def intervals(runs: Sequence[Scores]) -> dict[str, Interval]:
    """Return mean and interval over runs and prompts by column, within the range of the column;
    columns without a value in every run are left out.
    """
    return {name: in_range(found, name) for name, found in _t_intervals(runs).items()}


def _t_intervals(runs: Sequence[Scores]) -> dict[str, Interval]:
    if not runs:
        return {}
    found = {name: t_interval(np.array([run[name] for run in runs])) for name in runs[0]}
    return {name: interval for name, interval in found.items() if math.isfinite(interval.mean)}


@dataclass(frozen=True)
class RecipeComparison:
    """Comparison of two recipes: the first minus the second, for each metric that both have."""

    question: str
    setting: str
    seeds: list[int]  # common to both recipes
    differences: dict[str, Interval]
    confounder: str = ""  # why the differences are not due to the question's methods
    costs: dict[str, str] = field(default_factory=dict)  # of both recipes in words, by column

    def verdict(self, measure: str) -> str:
        """Return ``higher`` or ``lower`` if the interval excludes 0 and the methods explain it,
        else the reason for no verdict.
        """
        if not self.seeds:
            return "no common seed: no verdict"
        if len(self.seeds) == 1:
            return "one seed: no verdict"
        difference = self.differences.get(measure)
        if difference is None:
            return "not measured"
        if not difference.excludes_zero:
            return "no significant difference"
        if self.confounder:
            return "confounded"
        return "higher" if difference.mean > 0 else "lower"


def compare(
    question: str, firsts: Mapping[int, Scores], seconds: Mapping[int, Scores], setting: str = ""
) -> RecipeComparison:
    """Compare the scores of two recipes by training seed."""
    seeds = sorted(firsts.keys() & seconds.keys())
    pairs = [(firsts[seed], seconds[seed]) for seed in seeds]
    differences = [{name: first[name] - second[name] for name in first} for first, second in pairs]
    return RecipeComparison(question, setting, seeds, _t_intervals(differences))


def as_markdown(
    comparisons: list[RecipeComparison], columns: Iterable[str], notes: Iterable[str]
) -> str:
    """Format a row for each question, with a verdict on each metric, or on the reward only if there
    are settings, and the costs that the first comparison has.
    """
    names = [
        name
        for name in columns
        if any(name in comparison.differences for comparison in comparisons)
    ]
    has_settings = len(comparisons) > 0 and comparisons[0].setting != ""
    costs = list(comparisons[0].costs) if comparisons else []
    heads = ["Question", "Seeds", *costs, *names]
    if has_settings:
        heads = ["Question", "Setting", "Seeds", *costs, *names, "Verdict"]
    rows = [heads, ["---"] * len(heads)]
    for comparison in comparisons:
        cells = [comparison.question]
        if has_settings:
            cells.append(comparison.setting)
        cells.append(format_seeds(len(comparison.seeds)))
        cells += [comparison.costs[name] for name in costs]
        for name in names:
            cell = "-"
            if name in comparison.differences:
                mean, interval = format_interval(comparison.differences[name], sign="+")
                cell = f"{mean}{interval}"
            if not has_settings:
                cell = f"{cell}: {comparison.verdict(name)}"
            cells.append(cell)
        if has_settings:
            cells.append(comparison.verdict("Reward"))
        rows.append(cells)
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*lines, "", *notes]) + "\n"
