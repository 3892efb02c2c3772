"""Table 2 from evaluations: rows sampler x trust region (x equalizer), columns per reward setting, mean and interval.

Measures of a video (Overall, VQ, ..., the true reward) get a t interval over training seeds and prompts; measures of a
whole set (the Frechet distance) have one value a seed, and get one over seeds.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from hyvideo.config.settings import REWARD_PRESETS
from hyvideo.evaluation.scores_file import Evaluation, by_prompt
from hyvideo.evaluation.table2.intervals import Interval, t_interval
from hyvideo.evaluation.table2.runs import METHODS, SETTINGS, TableRun


@dataclass(frozen=True)
class Column:
    """A measure of the table."""

    name: str
    of_set: str = ""  # name among the measures of the whole set; empty for a score of each video
    higher_is_better: bool = True

    def of_video(self, entry: dict, setting: str) -> float | None:
        if self in (REWARD, TRUE_REWARD):
            return weighted_reward(entry, setting, "true/" if self == TRUE_REWARD else "")
        return entry.get(self.name)

    def by_prompt(self, evaluation: Evaluation, setting: str) -> dict[int, float]:
        """Mean of each prompt that has a value; a measure of a whole set is as one of a single prompt."""
        if not self.of_set:
            return by_prompt(evaluation.videos, lambda entry: self.of_video(entry, setting))
        value = evaluation.measures.get(self.of_set)
        return {} if value is None else {0: value}


def weighted_reward(entry: dict, setting: str, prefix: str = "") -> float | None:
    """The reward of a setting; with ``true/`` as prefix, of the measured truth in place of the scorer's opinion."""
    weights = REWARD_PRESETS[SETTINGS[setting]]
    values = [entry.get(f"{prefix}{name}") for name in weights]
    return None if None in values else sum(weight * value for weight, value in zip(weights.values(), values))


REWARD, TRUE_REWARD = Column("Reward"), Column("True reward")
FRECHET = Column("Frechet distance", of_set="frechet_distance", higher_is_better=False)
COLUMNS = (*map(Column, ("Overall", "VQ", "MQ", "TA", "CLIPScore", "PickScore")), TRUE_REWARD, FRECHET)


@dataclass(frozen=True)
class RowKey:
    """Key of a row; the base model has no method."""

    method: str | None
    kl: str = ""
    has_equalizer: bool = True

    @property
    def label(self) -> str:
        return METHODS[self.method] if self.method else "Base model"

    @property
    def kl_label(self) -> str:
        return self.kl.replace("_", " ")

    @staticmethod
    def of(run: TableRun) -> "RowKey":
        return RowKey(run.method, run.kl, run.has_equalizer)


@dataclass(frozen=True)
class Table:
    """Numbers of the table, and the number of training seeds of each row and setting."""

    settings: list[str]
    columns: list[Column]
    rows: list[RowKey]
    values: dict[tuple[RowKey, str, str], Interval]  # by row, setting and column
    num_seeds: dict[tuple[RowKey, str], int]
    num_videos: int  # of one evaluation
    unfinished: list[TableRun]

    @property
    def shows_equalizer(self) -> bool:
        return any(not row.has_equalizer for row in self.rows)

    def best(self, setting: str, column: Column) -> RowKey | None:
        """The trained row with the best mean."""
        values = {row: self.values.get((row, setting, column.name)) for row in self.rows if row.method}
        means = {row: value.mean for row, value in values.items() if value}
        choose = max if column.higher_is_better else min
        return choose(means, key=means.get, default=None)


def make_table(base: Evaluation, runs: list[TableRun], evaluations: dict[TableRun, Evaluation]) -> Table:
    """The table of all planned runs; those without an evaluation are named, and take no part in the means."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    rows = [RowKey(None), *dict.fromkeys(RowKey.of(run) for run in runs if run in evaluations)]
    values: dict[tuple[RowKey, str, str], Interval] = {}
    num_seeds: dict[tuple[RowKey, str], int] = {}
    for row, setting in itertools.product(rows, settings):
        of_row = [e for run, e in evaluations.items() if (RowKey.of(run), run.setting) == (row, setting)]
        of_row = of_row if row.method else [base]
        num_seeds[row, setting] = len(of_row)
        for column in COLUMNS if of_row else ():
            interval = over_seeds([column.by_prompt(evaluation, setting) for evaluation in of_row])
            if np.isfinite(interval.mean):
                values[row, setting, column.name] = interval
    present = {name for _, _, name in values}
    return Table(
        settings=settings,
        columns=[column for column in COLUMNS if column.name in present],
        rows=rows,
        values=values,
        num_seeds=num_seeds,
        num_videos=len(base.videos),
        unfinished=[run for run in runs if run not in evaluations],
    )


def over_seeds(tables: list[dict[int, float]]) -> Interval:
    """Mean and interval of values by prompt, a table for each seed."""
    prompts = sorted(set().union(*tables))
    values = [[table.get(prompt, np.nan) for prompt in prompts] for table in tables]
    return t_interval(np.array(values, dtype=float).reshape(len(tables), len(prompts)))
