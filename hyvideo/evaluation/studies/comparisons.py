"""Answers of a study: paired differences of two policies, and what they are said to show.

Two runs of one seed share rollout noise, and all share the evaluation's prompts and noise: the interval is of the
differences by seed and prompt, over the seeds that both have.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hyvideo.evaluation.scores_file import Evaluation
from hyvideo.evaluation.studies.columns import REWARD, Column, intervals
from hyvideo.evaluation.studies.intervals import Interval
from hyvideo.evaluation.studies.table import in_words, markdown_table, seeds_in_words

VIDEO = ("number", "prompt", "seed", "group")  # what says which video an entry is of
EACH_BY_ITSELF = "Each interval is of its own question: of 20 without an effect, one would show by chance."


@dataclass(frozen=True)
class Comparison:
    """A question to two recipes, and the first less the second by measure, where both have it."""

    question: str
    setting: str
    seeds: list[int]  # that both have
    differences: dict[str, Interval]

    def verdict(self, measure: str) -> str:
        """``more`` or ``less`` where the interval excludes 0, and why nothing is said where it does not."""
        if len(self.seeds) < 2:
            return "one seed: no verdict" if self.seeds else "no common seed: no verdict"
        difference = self.differences.get(measure)
        if difference is None:
            return "not measured"
        return ("more" if difference.mean > 0 else "less") if difference.excludes_zero else "not seen"

    @property
    def reading(self) -> str:
        """Verdict on the reward."""
        verdict = self.verdict(REWARD.name)
        return f"shows: {verdict}" if verdict in ("more", "less") else verdict


def compare(
    question: str,
    firsts: Mapping[int, Evaluation],
    seconds: Mapping[int, Evaluation],
    columns: Iterable[Column],
    setting: str = "",
) -> Comparison:
    """The first less the second, each by training seed. Raises ValueError where they were measured on other videos."""
    seeds = sorted(firsts.keys() & seconds.keys())
    pairs = [difference(firsts[seed], seconds[seed], f"{question}, seed {seed}") for seed in seeds]
    return Comparison(question, setting, seeds, intervals(pairs, columns, setting))


def difference(first: Evaluation, second: Evaluation, question: str) -> Evaluation:
    """Scores of the first less the second, by video; columns are linear in them. ValueError for other videos."""
    videos = [[[entry.get(name) for name in VIDEO] for entry in of.videos] for of in (first, second)]
    if videos[0] != videos[1]:
        raise ValueError(
            f"{question}: both must be measured on the same prompts and noise to be compared, and are not; remove "
            "their files in scores/, and they are evaluated anew"
        )
    entries = [_less(entry, other) | {"group": entry["group"]} for entry, other in zip(first.videos, second.videos)]
    return Evaluation(entries, _less(first.measures, second.measures))


def _less(values: dict, others: dict) -> dict[str, float]:
    """Differences of the numbers that both have."""
    names = [name for name in values if all(isinstance(of.get(name), (int, float)) for of in (values, others))]
    return {name: values[name] - others[name] for name in names}


def as_markdown(comparisons: list[Comparison], columns: Iterable[Column], notes: Iterable[str]) -> str:
    """A line for each question; the verdict on every measure, or, where there are settings, on the reward alone."""
    names = [column.name for column in columns if any(column.name in c.differences for c in comparisons)]
    by_setting, rows = any(c.setting for c in comparisons), []
    for c in comparisons:
        cells = ["".join(in_words(c.differences[n], sign="+")) if n in c.differences else "-" for n in names]
        if by_setting:
            rows.append([c.question, c.setting, seeds_in_words(len(c.seeds)), *cells, c.reading])
        else:
            said = [f"{cell}: {c.verdict(name)}" for name, cell in zip(names, cells)]
            rows.append([c.question, seeds_in_words(len(c.seeds)), *said])
    heads = ["Question", "Setting", "Seeds", *names, "Reading"] if by_setting else ["Question", "Seeds", *names]
    return markdown_table(heads, rows, notes)
