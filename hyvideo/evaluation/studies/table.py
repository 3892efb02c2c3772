"""Tables of means and intervals as Markdown, CSV and LaTeX, with the best trained row of each column in bold."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.templates import fill
from hyvideo.evaluation.scores_file import write_csv
from hyvideo.evaluation.studies.columns import Column
from hyvideo.evaluation.studies.intervals import Interval
from hyvideo.records.run_files import write_text


@dataclass(frozen=True)
class Row:
    """Values of a recipe or of the base model."""

    labels: list[str]
    values: dict[tuple[str, str], Interval]  # by group and column
    num_seeds: dict[str, int]  # training seeds by group; empty for the base model


@dataclass(frozen=True)
class Table:
    """Rows of labels and values; every group has all columns."""

    heads: list[str]  # of the labels
    groups: dict[str, str]  # short -> long name; empty strings for a single group
    columns: list[Column]
    rows: list[Row]
    notes: list[str]

    @property
    def places(self) -> list[tuple[str, Column]]:
        return [(group, column) for group in self.groups for column in self.columns]

    def best(self, group: str, column: Column) -> Row | None:
        """Return the trained row with the best mean."""
        having = [row for row in self.rows if row.num_seeds and (group, column.name) in row.values]
        choose = max if column.higher_is_better else min
        return choose(having, key=lambda row: row.values[group, column.name].mean, default=None)


def make_table(
    heads: list[str], groups: dict[str, str], columns: Iterable[Column], rows: list[Row], notes: list[str]
) -> Table:
    """Return a table of the columns for which any row has a value."""
    present = {name for row in rows for _, name in row.values}
    return Table(heads, groups, [column for column in columns if column.name in present], rows, notes)


def write_table(table: Table, path: Path) -> None:
    """Write <path>.md, .csv and .tex."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.with_suffix(".md"), as_markdown(table))
    write_csv(path.with_suffix(".csv"), [_csv_row(table, row) for row in table.rows])
    write_text(path.with_suffix(".tex"), as_latex(table))


def as_markdown(table: Table) -> str:
    heads = [*table.heads, "Seeds", *(_title(*place, ": ") for place in table.places)]
    rows = [_cells(table, row, bold="**{}**") for row in table.rows]
    return fill(Path(__file__).with_suffix(".md.jinja"), heads=heads, rows=rows, notes=table.notes) + "\n"


def _csv_row(table: Table, row: Row) -> dict[str, object]:
    """Return number of seeds, then mean, low and high of each column; missing values are empty."""
    cells: dict[str, object] = dict(zip(table.heads, row.labels))
    for group in table.groups:
        cells[f"{group} seeds".strip()] = row.num_seeds.get(group, "")
        for column in table.columns:
            value = row.values.get((group, column.name))
            for end, number in zip(("", " low", " high"), value.as_json().values() if value else [None] * 3):
                cells[f"{_title(group, column)}{end}"] = "" if number is None else f"{number:.6g}"
    return cells


def as_latex(table: Table) -> str:
    """Format a tabular with booktabs rules."""
    rows = [(row, _cells(table, row, bold=r"\textbf{{{}}}", minus="$-$")) for row in table.rows]
    return fill(Path(__file__).with_name("table.tex.jinja"), table=table, rows=rows) + "\n"


def format_seeds(count: int) -> str:
    return "one seed" if count == 1 else str(count)


def format_interval(interval: Interval, *, sign: str = "", minus: str = "-") -> tuple[str, str]:
    """Format the mean and the interval in brackets, which is empty for a mean of one value."""
    mean, low, high = (f"{x:{sign}.3f}".replace("-", minus) for x in (interval.mean, interval.low, interval.high))
    return mean, f" [{low}, {high}]" if math.isfinite(interval.low) else ""


def _title(group: str, column: Column, between: str = " ") -> str:
    return f"{group}{between}{column.name}" if group else column.name


def _cells(table: Table, row: Row, *, bold: str, minus: str = "-") -> list[str]:
    """Return labels, number of training seeds (of each group if they differ) and values of a row."""
    cells = [*row.labels, " / ".join(dict.fromkeys(map(format_seeds, row.num_seeds.values())))]
    for group, column in table.places:
        value = row.values.get((group, column.name))
        mean, interval = format_interval(value, minus=minus) if value else ("-", "")
        cells.append((bold.format(mean) if value and table.best(group, column) is row else mean) + interval)
    return cells
