"""Tables in CSV files, as people and spreadsheets write them."""

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hyvideo.data.files import read_text
from hyvideo.data.text import quote


def read_rows(path: Path, what: str, names: Collection[str]) -> list[dict[str, str]]:
    """Read the rows of a CSV file with a column ``prompt``, without blank ones.

    Cells that are missing at the end of a row are empty. ``what`` names the kind of file in
    messages. The columns ``names`` are found in any case and between blanks; they must not occur
    twice, because only the last would be read. Raises ValueError, naming the file, for any other
    file.
    """
    try:
        text = read_text(path)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    try:
        # otherwise an unclosed quote includes the next rows in its cell
        reader = csv.DictReader(io.StringIO(text), strict=True)
        columns = [_column_name(name, names) for name in reader.fieldnames or []]
        reader.fieldnames = columns
        _check_columns(columns, what, names, path)
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(
            f"{what} must be UTF-8 text in CSV form, got {quote(path)} ({error}, line "
            f"{reader.reader.line_num}; put a cell that contains a comma, a line break or quotes "
            "in double quotes, and double the quotes in it)"
        ) from error
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(
                f"row {number} of {path} has more cells than columns; put a cell that contains a "
                f"comma in double quotes: {quote(row['prompt'])}"
            )
    found = [{name: cell or "" for name, cell in row.items()} for row in rows]
    # spreadsheets may end a table with rows of commas only
    return [row for row in found if any(cell.strip() for cell in row.values())]


def _check_columns(columns: list[str], what: str, names: Collection[str], path: Path) -> None:
    """Raise ValueError if the column ``prompt`` is missing, or one of ``names`` occurs twice."""
    if "prompt" not in columns:
        got = quote(", ".join(columns), 300)[1:-1] or "no columns"
        is_separated = len(columns) == 1 and any(mark in columns[0] for mark in ";\t")
        advice = "; separate the columns with commas" if is_separated else ""
        raise ValueError(f"{what} needs a column named `prompt`, got {got} in {path}{advice}")
    for column in names:
        count = columns.count(column)
        if count > 1:
            raise ValueError(f"{what} must have one column `{column}`, got {count} in {path}")


def _column_name(name: str, names: Collection[str]) -> str:
    """Return the one of ``names`` that a column of a CSV means, else the name as it is."""
    folded = name.strip().casefold()
    return folded if folded in names else name


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return file.getvalue()
