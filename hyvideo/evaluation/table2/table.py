"""Table 2 from evaluations: rows sampler x trust region (x equalizer), columns per reward setting, mean and interval.

Measures of a video (Overall, VQ, ..., the true reward) get a bootstrap interval over prompts x training seeds; measures
of a whole set (the Frechet distance) have one value a seed, and get the smallest and the largest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyvideo.config.settings import REWARD_PRESETS
from hyvideo.evaluation.scores_file import Evaluation, by_prompt
from hyvideo.evaluation.table2.bootstrap import Interval, bootstrap_interval
from hyvideo.evaluation.table2.runs import METHODS, SETTINGS, TableRun

TRUE = "true/"


@dataclass(frozen=True)
class Column:
    """A measure of the table."""

    name: str
    of_video: Callable[[dict, str], float | None] | None  # entry, setting -> value; None for a measure of the set
    of_set: str = ""  # name among the measures of the set
    higher_is_better: bool = True


def _score(name: str) -> Callable[[dict, str], float | None]:
    return lambda entry, setting: entry.get(name)


def _true_reward(entry: dict, setting: str) -> float | None:
    """The reward with the measured truth in the place of the scorer's opinion."""
    weights = REWARD_PRESETS[SETTINGS[setting]]
    values = [entry.get(TRUE + name) for name in weights]
    return None if None in values else sum(weight * value for weight, value in zip(weights.values(), values))


COLUMNS = (
    Column("Overall", _score("Overall")),
    Column("VQ", _score("VQ")),
    Column("MQ", _score("MQ")),
    Column("TA", _score("TA")),
    Column("CLIPScore", _score("CLIPScore")),
    Column("PickScore", _score("PickScore")),
    Column("True reward", _true_reward),
    Column("Frechet distance", None, of_set="frechet_distance", higher_is_better=False),
)


@dataclass(frozen=True)
class RowKey:
    """Key of a row; the base model has no method."""

    method: str | None
    kl: str = ""
    has_equalizer: bool = True

    @property
    def label(self) -> str:
        return METHODS[self.method] if self.method else "Base model"

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
        means = {
            row: self.values[row, setting, column.name].mean
            for row in self.rows
            if row.method and (row, setting, column.name) in self.values
        }
        finite = {row: mean for row, mean in means.items() if np.isfinite(mean)}
        choose = max if column.higher_is_better else min
        return choose(finite, key=finite.get) if finite else None


def make_table(
    base: Evaluation, runs: list[TableRun], evaluations: dict[TableRun, Evaluation], *, seed: int = 0
) -> Table:
    """The table of all planned runs; those without an evaluation are named, and take no part in the means.

    Args:
        seed: Of the bootstrap.
    """
    settings = list(dict.fromkeys(run.setting for run in runs))
    rows = [RowKey(None), *dict.fromkeys(RowKey.of(run) for run in runs)]
    values: dict[tuple[RowKey, str, str], Interval] = {}
    num_seeds: dict[tuple[RowKey, str], int] = {}
    for row in rows:
        for setting in settings:
            of_row = [e for run, e in evaluations.items() if (RowKey.of(run), run.setting) == (row, setting)]
            of_row = of_row if row.method else [base]
            num_seeds[row, setting] = len(of_row)
            for column in COLUMNS:
                interval = _interval(column, setting, of_row, seed) if of_row else None
                if interval is not None and np.isfinite(interval.mean):
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


def _interval(column: Column, setting: str, evaluations: list[Evaluation], seed: int) -> Interval | None:
    if column.of_video is None:
        values = [evaluation.measures.get(column.of_set) for evaluation in evaluations]
        finite = [value for value in values if value is not None]
        return Interval(float(np.mean(finite)), min(finite), max(finite)) if finite else None
    tables = [by_prompt(e.videos, lambda entry: column.of_video(entry, setting)) for e in evaluations]
    prompts = sorted(set().union(*tables))
    values = np.array([[table.get(prompt, np.nan) for prompt in prompts] for table in tables])
    return bootstrap_interval(values, seed=seed)
