"""Comparisons of a study: paired differences of two policies, and verdicts on them.

Runs of the same seed share rollout noise, and all runs share the prompts and noise of the evaluation. Intervals are
those of the differences by seed and prompt, over the seeds that both policies have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.templates import fill
from hyvideo.evaluation.scores_file import Evaluation
from hyvideo.evaluation.studies.columns import REWARD, Column, intervals
from hyvideo.evaluation.studies.intervals import Interval
from hyvideo.evaluation.studies.table import format_interval, format_seeds

VIDEO = ("number", "prompt", "seed", "group")  # keys that identify a video
NO_CORRECTION = "Without correction for multiple tests, about 1 in 20 null comparisons is flagged by chance."


@dataclass(frozen=True)
class Comparison:
    """Comparison of two recipes: the first minus the second, for each metric that both have."""

    question: str
    setting: str
    seeds: list[int]  # common to both recipes
    differences: dict[str, Interval]

    def verdict(self, measure: str) -> str:
        """Return ``higher`` or ``lower`` if the interval excludes 0, else the reason for no verdict."""
        if len(self.seeds) < 2:
            return "one seed: no verdict" if self.seeds else "no common seed: no verdict"
        difference = self.differences.get(measure)
        if difference is None:
            return "not measured"
        significant = "higher" if difference.mean > 0 else "lower"
        return significant if difference.excludes_zero else "no significant difference"


def compare(
    question: str,
    firsts: Mapping[int, Evaluation],
    seconds: Mapping[int, Evaluation],
    columns: Iterable[Column],
    setting: str = "",
) -> Comparison:
    """Compare evaluations by training seed. Raises ValueError if their prompts or noise differ."""
    seeds = sorted(firsts.keys() & seconds.keys())
    pairs = [difference(firsts[seed], seconds[seed], f"{question}, seed {seed}") for seed in seeds]
    return Comparison(question, setting, seeds, intervals(pairs, columns, setting))


def difference(first: Evaluation, second: Evaluation, question: str) -> Evaluation:
    """Return the scores of the first minus those of the second, by video. Raises ValueError for different videos."""
    videos = [[[entry.get(name) for name in VIDEO] for entry in each.videos] for each in (first, second)]
    if videos[0] != videos[1]:
        raise ValueError(
            f"{question}: the evaluations must have the same prompts and noise; delete their files in scores/ to "
            "evaluate them again"
        )
    kept = [{name: entry[name] for name in ("group", "seen") if name in entry} for entry in first.videos]
    entries = [_subtract(entry, other) | same for entry, other, same in zip(first.videos, second.videos, kept)]
    return Evaluation(entries, _subtract(first.measures, second.measures))


def _subtract(values: dict, others: dict) -> dict[str, float]:
    """Return the differences of the numbers that both have."""
    names = [name for name in values if all(isinstance(each.get(name), (int, float)) for each in (values, others))]
    return {name: values[name] - others[name] for name in names}


def as_markdown(comparisons: list[Comparison], columns: Iterable[Column], notes: Iterable[str]) -> str:
    """Format a row for each question, with a verdict on each metric, or on the reward only if there are settings."""
    names = [column.name for column in columns if any(column.name in c.differences for c in comparisons)]
    forms = {"format_interval": format_interval, "format_seeds": format_seeds, "reward": REWARD.name}
    template = Path(__file__).with_suffix(".md.jinja")
    return fill(template, comparisons=comparisons, names=names, notes=notes, **forms) + "\n"
