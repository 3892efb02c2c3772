"""Tables of means and intervals as Markdown, CSV and LaTeX, with the best trained row of each
column in bold.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from hyvideo.records.run_files import write_text
from hyvideo.validation.intervals import Interval
from hyvideo.validation.scores_file import write_csv

LOWER_IS_BETTER = "Frechet distance"  # as a column's name, or its end


@dataclass(frozen=True)
class Row:
    """Values of a recipe or of the base model."""

    labels: list[str]
    seeds: str  # number of training seeds; empty for the base model
    values: dict[str, Interval]  # by column


@dataclass(frozen=True)
class Table:
    """Rows of labels, number of seeds and values."""

    heads: list[str]  # of the labels
    rows: list[Row]
    notes: list[str]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def best(self, column: str) -> Row | None:
        """Return the trained row with the best mean."""
        having = [row for row in self.rows if row.seeds and column in row.values]
        choose = min if column.endswith(LOWER_IS_BETTER) else max
        return choose(having, key=lambda row: row.values[column].mean, default=None)

    def cells(self, row: Row, *, bold: str, minus: str = "-") -> list[str]:
        """Return labels, number of seeds and values of a row as text."""
        cells = [*row.labels, row.seeds]
        for column in self.columns:
            value = row.values.get(column)
            if value is None:
                cells.append("-")
                continue
            mean, interval = format_interval(value, minus=minus)
            if self.best(column) is row:
                mean = bold.format(mean)
            cells.append(mean + interval)
        return cells


def write_table(table: Table, path: Path) -> None:
    """Write <path>.md, .csv and .tex."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.with_suffix(".md"), as_markdown(table))
    write_csv(path.with_suffix(".csv"), [_csv_row(table, row) for row in table.rows])
    write_text(path.with_suffix(".tex"), as_latex(table))


def as_markdown(table: Table) -> str:
    """Format the table with its notes below."""
    heads = [*table.heads, "Seeds", *table.columns]
    rows = [heads, ["---"] * len(heads)]
    rows += [table.cells(row, bold="**{}**") for row in table.rows]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*lines, "", *table.notes]) + "\n"


def as_latex(table: Table) -> str:
    """Format a tabular with booktabs rules."""
    heads = [*table.heads, "Seeds", *table.columns]
    lines = [f"% {note}" for note in table.notes]
    lines.append(rf"\begin{{tabular}}{{l{'l' * len(table.heads)}{'c' * len(table.columns)}}}")
    lines += [r"\toprule", rf"{' & '.join(heads)} \\", r"\midrule"]
    for row in table.rows:
        cells = table.cells(row, bold=r"\textbf{{{}}}", minus="$-$")
        lines.append(rf"{' & '.join(cells)} \\")
        if not row.seeds:  # the base model is separated from the trained policies
            lines.append(r"\midrule")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _csv_row(table: Table, row: Row) -> dict[str, str]:
    """Return labels and number of seeds, then mean, low and high of each column; missing values are
    empty.
    """
    cells = dict(zip([*table.heads, "Seeds"], [*row.labels, row.seeds]))
    for column in table.columns:
        interval = row.values.get(column)
        numbers = interval.as_json() if interval else {}
        for name, end in (("mean", ""), ("low", " low"), ("high", " high")):
            number = numbers.get(name)
            cells[f"{column}{end}"] = "" if number is None else f"{number:.6g}"
    return cells


def format_seeds(count: int) -> str:
    return "one seed" if count == 1 else str(count)


def format_interval(interval: Interval, *, sign: str = "", minus: str = "-") -> tuple[str, str]:
    """Format the mean and the interval in brackets, which is empty for a mean of one value."""
    mean, low, high = (
        f"{x:{sign}.3f}".replace("-", minus) for x in (interval.mean, interval.low, interval.high)
    )
    if not math.isfinite(interval.low):
        return mean, ""
    return mean, f" [{low}, {high}]"
