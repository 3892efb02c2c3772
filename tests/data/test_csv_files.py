"""CSV files that spreadsheets may open: no cell is run as a formula, and reading gives what was
written.
"""

import csv

import pytest

from hyvideo.data.csv_files import csv_text, read_rows

FORMULA = '=HYPERLINK("http://x", "a")'


@pytest.mark.parametrize(
    "text, cell",
    [(FORMULA, f"'{FORMULA}"), ("'=a", "''=a"), ("-0.5", "-0.5")],
)
def test_text_is_no_formula_and_read_as_it_was_written(tmp_path, text, cell):
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(["prompt", "score"], [[text, -0.5], ["next", None]]))
    with path.open(newline="") as file:
        assert [row[:2] for row in csv.reader(file)][1] == [cell, "-0.5"]
    assert read_rows(path, "a CSV", ["prompt"]) == [
        {"prompt": text, "score": "-0.5"},
        {"prompt": "next", "score": ""},
    ]
