"""Tables in CSV files: reading those that people and spreadsheets write, and writing those that
spreadsheets read.
"""

import csv
import io
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hyvideo.data.files import MAX_BYTES, read_text
from hyvideo.data.text import quote

# Spreadsheets run a cell that begins like this as a formula, such as a prompt "=HYPERLINK(...)",
# and show it as text after an apostrophe. A single dash stands for no value.
_FORMULA = re.compile(r"'*[=@+\-].")


def read_rows(path: Path, what: str, names: Collection[str]) -> list[dict[str, str]]:
    """Read the rows of a CSV file with a column ``prompt``, without blank ones.

    Cells that are missing at the end of a row are empty. ``what`` names the kind of file in
    messages. The columns ``names`` are found in any case and between blanks; they must not occur
    twice, because only the last would be read. Raises ValueError, naming the file, for any other
    file.
    """
    try:
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{what}: file not found: {path}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} must be UTF-8 text in CSV form, got {quote(path)} ({error}); save it as UTF-8"
        ) from error
    except (IsADirectoryError, PermissionError) as error:
        raise ValueError(
            f"{what} must be a readable file, got {quote(path)}: {error.strerror}"
        ) from error
    try:
        csv.field_size_limit(MAX_BYTES)  # prompts have a separate limit, other columns have none
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
    found = [{name: _from_cell(cell or "") for name, cell in row.items()} for row in rows]
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
    """Return a table as CSV. Text that a spreadsheet would run as a formula gets an apostrophe,
    which `read_rows` removes.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(map(_to_cell, row))
    return file.getvalue()


def _to_cell(value: object) -> object:
    """Return a value for a cell that no spreadsheet runs; numbers stay as they are."""
    if isinstance(value, str) and _FORMULA.match(value) and not _is_number(value):
        return f"'{value}"
    return value


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _from_cell(text: str) -> str:
    """Return the text of a cell without the apostrophe of `_to_cell`."""
    if text.startswith("'") and _FORMULA.match(text):
        return text[1:]
    return text
