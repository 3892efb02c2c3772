"""Table 2 as Markdown, CSV and LaTeX: the same rows and columns, the best trained row of each column in bold."""

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path

from hyvideo.evaluation.table2.intervals import Interval
from hyvideo.evaluation.table2.runs import SETTINGS
from hyvideo.evaluation.table2.table import Column, RowKey, Table
from hyvideo.models.weight_files import shortened
from hyvideo.records.run_files import write_text


def write_table(table: Table, folder: Path) -> list[Path]:
    """Writes table2.md, table2.csv and table2.tex."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"table2.md": as_markdown(table), "table2.csv": as_csv(table), "table2.tex": as_latex(table)}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def as_markdown(table: Table) -> str:
    heads = _row_heads(table) + ["Seeds"] + [f"{setting}: {column.name}" for setting, column in _columns(table)]
    rows = []
    for row in table.rows:
        cells = [_cell(table, row, *place, bold="**{}**", minus="-") for place in _columns(table)]
        rows.append(_row_labels(table, row) + [_seeds(table, row)] + cells)
    return markdown_table(heads, rows, notes(table))


def markdown_table(heads: list[str], rows: list[list[str]], below: Iterable[str]) -> str:
    """A table of cells, and lines of text below it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([*lines, "", *below]) + "\n"


def as_csv(table: Table) -> str:
    """Number of seeds, then mean, low and high of each column; empty where there is nothing."""
    heads = _row_heads(table)
    for setting in table.settings:
        heads.append(f"{setting} seeds")
        for column in table.columns:
            heads += [f"{setting} {column.name}{end}" for end in ("", " low", " high")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    for row in table.rows:
        cells: list[object] = list(_row_labels(table, row))
        for setting in table.settings:
            cells.append(table.num_seeds[row, setting] if row.method else "")
            for column in table.columns:
                value = table.values.get((row, setting, column.name))
                numbers = value.as_json().values() if value else [None] * 3
                cells += ["" if number is None else f"{number:.6g}" for number in numbers]
        writer.writerow(cells)
    return text.getvalue()


def as_latex(table: Table) -> str:
    """A tabular with the rules of booktabs."""
    row_heads, per_setting = [*_row_heads(table), "Seeds"], len(table.columns)
    num_heads = len(row_heads)
    groups = [rf"\multicolumn{{{per_setting}}}{{c}}{{Setting {s} ({SETTINGS[s]})}}" for s in table.settings]
    heads = row_heads + [column.name for _, column in _columns(table)]
    lines = [
        *[f"% {note}" for note in notes(table)],
        rf"\begin{{tabular}}{{{'l' * num_heads}{'c' * per_setting * len(table.settings)}}}",
        r"\toprule",
        " & ".join([""] * num_heads + groups) + r" \\",
        " & ".join(heads) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        cells = [_cell(table, row, *place, bold=r"\textbf{{{}}}", minus="$-$") for place in _columns(table)]
        lines.append(" & ".join([*_row_labels(table, row), _seeds(table, row), *cells]) + r" \\")
        if row.method is None:
            lines.append(r"\midrule")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def notes(table: Table) -> list[str]:
    """Sentences on what the numbers are, and what is missing."""
    settings = ", ".join(f"{setting} = {SETTINGS[setting]}" for setting in table.settings)
    seeds = sorted({number for (row, _), number in table.num_seeds.items() if row.method and number})
    trained = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]]))) if seeds else "no"
    lines = [
        f"Reward settings: {settings}. {table.num_videos} held-out videos a policy, same prompts and noise for all; "
        f"means over {trained} training seed(s), 95 % interval of Student's t over seeds and prompts. A prompt that "
        "lacks a score in one of a row's seeds is left out of the row.",
    ]
    if seeds and seeds[0] == 1:
        lines.append("One seed: the interval is over prompts alone; what another seed would change is not in it.")
    if any(column.of_set for column in table.columns):
        lines.append(
            "Measures of a whole set (Frechet distance; lower is better): interval over seeds, none for one seed."
        )
    if table.unfinished:
        names = ", ".join(shortened([run.name for run in table.unfinished]))
        lines.append(f"Without a finished run, and not in the means: {names}.")
    return lines


def _columns(table: Table) -> list[tuple[str, Column]]:
    return [(setting, column) for setting in table.settings for column in table.columns]


def _row_heads(table: Table) -> list[str]:
    return ["Method", "KL", *(["Equalizer"] if table.shows_equalizer else [])]


def _row_labels(table: Table, row: RowKey) -> list[str]:
    equalizer = ("yes" if row.has_equalizer else "no") if row.method else ""
    return [row.label, row.kl_label, *([equalizer] if table.shows_equalizer else [])]


def _seeds(table: Table, row: RowKey) -> str:
    """Number of training seeds, of each setting where they differ."""
    counts = dict.fromkeys(table.num_seeds[row, setting] for setting in table.settings)
    return " / ".join(map(seeds_in_words, counts)) if row.method else ""


def seeds_in_words(count: int) -> str:
    return "one seed" if count == 1 else str(count)


def in_words(interval: Interval, *, sign: str = "", minus: str = "-") -> tuple[str, str]:
    """The mean, and the interval in brackets; empty for a mean of one value."""
    mean, low, high = (f"{x:{sign}.3f}".replace("-", minus) for x in (interval.mean, interval.low, interval.high))
    return mean, f" [{low}, {high}]" if math.isfinite(interval.low) else ""


def _cell(table: Table, row: RowKey, setting: str, column: Column, *, bold: str, minus: str) -> str:
    value = table.values.get((row, setting, column.name))
    if value is None:
        return "-"
    mean, interval = in_words(value, minus=minus)
    return (bold.format(mean) if table.best(setting, column) == row else mean) + interval
