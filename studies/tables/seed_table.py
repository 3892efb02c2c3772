"""Tables of pages, recomputed from the results of each seed in docs/data.

    labels, seed, metrics  ->  mean and 95 % t interval over seeds of each metric, by labels

A CSV file has columns of labels, a column ``seed``, and columns of metrics. Its rows are runs.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyvideo.files.text import quote
from hyvideo.validation.intervals import Interval, in_range, t_interval
from studies.tables.table import format_interval

SEED = "seed"
Label = tuple[str, ...]
Values = dict[str, dict[str, float]]  # by metric and seed


@dataclass(frozen=True)
class SeedTable:
    """Results of runs by their labels, such as the name of a recipe."""

    heads: list[str]  # of the labels
    metrics: list[str]
    values: dict[Label, Values]

    def intervals(self, label: Label) -> dict[str, Interval]:
        """Return mean and interval of each metric, within its range; metrics that no seed has are
        left out.
        """
        of_label = self.values[label]
        return {
            metric: in_range(_interval(list(of_label[metric].values())), metric)
            for metric in self.metrics
            if of_label[metric]
        }

    def differences(self, label: Label, other: Label) -> dict[str, Interval]:
        """Return mean and interval of the differences to another label, paired by seed."""
        found = {}
        for metric in self.metrics:
            mine, its = self.values[label][metric], self.values[other][metric]
            shared = [seed for seed in mine if seed in its]
            if shared:
                found[metric] = _interval([mine[seed] - its[seed] for seed in shared])
        return found

    def num_seeds(self, label: Label) -> int:
        return max(len(by_seed) for by_seed in self.values[label].values())


def read_seed_table(path: Path) -> SeedTable:
    """Read a CSV file of one row or more."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])
    end = columns.index(SEED)
    metrics = columns[end + 1 :]
    values: dict[Label, Values] = {}
    for row in rows:
        label = tuple(row[head] for head in columns[:end])
        of_label = values.setdefault(label, {metric: {} for metric in metrics})
        for metric in metrics:
            if row[metric] != "":
                of_label[metric][row[SEED]] = float(row[metric])
    return SeedTable(columns[:end], metrics, values)


def as_markdown(table: SeedTable, against: Label | None = None) -> str:
    """Return the table as Markdown; with ``against``, of the differences to that label.

    Raises ValueError for a label that the table lacks.
    """
    if against is not None and against not in table.values:
        known = "; ".join(",".join(label) for label in table.values)
        raise ValueError(f"--against must be one of {known}, got {quote(','.join(against))}")
    lines = [[*table.heads, "seeds", *table.metrics]]
    lines.append(["---"] * len(lines[0]))
    for label in table.values:
        if label == against:
            continue
        if against is None:
            found = table.intervals(label)
        else:
            found = table.differences(label, against)
        cells = []
        for metric in table.metrics:
            interval = found.get(metric)
            sign = "" if against is None else "+"
            cells.append("".join(format_interval(interval, sign=sign)) if interval else "")
        lines.append([*label, str(table.num_seeds(label)), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _interval(values: Sequence[float]) -> Interval:
    return t_interval(np.array(values)[:, None])
