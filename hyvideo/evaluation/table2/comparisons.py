"""Answers of a study: paired differences between rows of Table 2 that differ in one thing.

SAGE-GRPO against each sampler, the equalizer on against off, and the trust regions against each other, the other two
the same. Two runs of one seed share rollout noise, and all share the evaluation's prompts and noise: the interval is of
the differences by seed and prompt, over the seeds that both rows have.
"""

import itertools
from dataclasses import dataclass, fields

import numpy as np

from hyvideo.evaluation.scores_file import Evaluation
from hyvideo.evaluation.table2.intervals import Interval
from hyvideo.evaluation.table2.runs import KL_FLAGS, TableRun
from hyvideo.evaluation.table2.table import FRECHET, REWARD, TRUE_REWARD, RowKey, over_seeds
from hyvideo.evaluation.table2.table_files import in_words, markdown_table, seeds_in_words

MEASURES = (REWARD, TRUE_REWARD, FRECHET)
VIDEO = ("number", "prompt", "seed", "group")  # what says which video an entry is of
NOTES = (
    "Differences are of the first named against the second, paired by training seed, prompt and noise, over the seeds "
    "that both have; 95 % interval of Student's t over seeds and prompts (Frechet distance: over seeds).",
    '"Shows" is said of the reward, from two seeds on, where the interval excludes 0. Each interval is of its own '
    "question: of 20 without an effect, one would show by chance.",
)


@dataclass(frozen=True)
class Comparison:
    """A question to two rows, and the first less the second by measure, where both have it."""

    question: str
    setting: str
    first: RowKey
    second: RowKey
    seeds: list[int]  # that both have
    differences: dict[str, Interval]

    @property
    def reading(self) -> str:
        if len(self.seeds) < 2:
            return "one seed: no verdict" if self.seeds else "no common seed: no verdict"
        reward = self.differences.get(REWARD.name)
        if reward is None:
            return "not measured"
        if not reward.excludes_zero:
            return "not seen"
        return "shows: more" if reward.mean > 0 else "shows: less"


def compare(runs: list[TableRun], evaluations: dict[TableRun, Evaluation]) -> list[Comparison]:
    """Comparisons of all rows that have evaluations. Raises ValueError where runs were measured on other videos."""
    by_row: dict[tuple[str, RowKey], dict[int, TableRun]] = {}
    for run in runs:
        if run in evaluations:
            by_row.setdefault((run.setting, RowKey.of(run)), {})[run.seed] = run
    found = []
    for setting in dict.fromkeys(setting for setting, _ in by_row):
        for question, first, second in questions([row for of, row in by_row if of == setting]):
            firsts, seconds = by_row[setting, first], by_row[setting, second]
            seeds = sorted(firsts.keys() & seconds.keys())
            pairs = [difference(firsts[seed], seconds[seed], evaluations) for seed in seeds]
            intervals = [over_seeds([column.by_prompt(pair, setting) for pair in pairs]) for column in MEASURES]
            there = {c.name: interval for c, interval in zip(MEASURES, intervals) if np.isfinite(interval.mean)}
            found.append(Comparison(question, setting, first, second, seeds, there))
    return found


def questions(rows: list[RowKey]) -> list[tuple[str, RowKey, RowKey]]:
    """Pairs of rows that differ in one thing, with the question that they answer, kind by kind."""
    by_kind: dict[str, list] = {"method": [], "has_equalizer": [], "kl": []}
    strength = list(KL_FLAGS).index
    for first, second in itertools.permutations(rows, 2):
        differing = [f.name for f in fields(RowKey) if getattr(first, f.name) != getattr(second, f.name)]
        kl, without = first.kl_label, "" if first.has_equalizer else ", no equalizer"
        if differing == ["method"] and first.method == "sage_grpo":
            question = f"{first.label} against {second.label}, KL {kl}{without}"
        elif differing == ["has_equalizer"] and first.has_equalizer:
            question = f"equalizer on against off, {first.label}, KL {kl}"
        elif differing == ["kl"] and strength(first.kl) > strength(second.kl):
            question = f"KL {kl} against {second.kl_label}, {first.label}{without}"
        else:
            continue
        by_kind[differing[0]].append((question, first, second))
    return list(itertools.chain(*by_kind.values()))


def difference(first: TableRun, second: TableRun, evaluations: dict[TableRun, Evaluation]) -> Evaluation:
    """Scores of the first less those of the second, by video; every column of the table is linear in them.

    Raises ValueError where they have other videos, which cannot be paired.
    """
    of_first, of_second = evaluations[first], evaluations[second]
    videos = [[[entry.get(name) for name in VIDEO] for entry in of.videos] for of in (of_first, of_second)]
    if videos[0] != videos[1]:
        raise ValueError(
            f"{first.name} and {second.name} must be measured on the same prompts and noise to be compared, and are "
            "not; remove their files in scores/, and they are evaluated anew"
        )
    pairs = zip(of_first.videos, of_second.videos)
    entries = [_less(entry, other) | {"group": entry["group"]} for entry, other in pairs]
    return Evaluation(entries, _less(of_first.measures, of_second.measures))


def _less(values: dict, others: dict) -> dict[str, float]:
    """Differences of the numbers that both have."""
    names = [name for name in values if all(isinstance(of.get(name), (int, float)) for of in (values, others))]
    return {name: values[name] - others[name] for name in names}


def as_markdown(comparisons: list[Comparison]) -> str:
    columns = [column.name for column in MEASURES if any(column.name in c.differences for c in comparisons)]
    rows = []
    for answer in comparisons:
        found = {name: "".join(in_words(interval, sign="+")) for name, interval in answer.differences.items()}
        cells = [found.get(name, "-") for name in columns]
        rows.append([answer.question, answer.setting, seeds_in_words(len(answer.seeds)), *cells, answer.reading])
    return markdown_table(["Question", "Setting", "Seeds", *columns, "Reading"], rows, NOTES)
