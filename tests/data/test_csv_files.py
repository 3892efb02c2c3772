"""CSV files: reading gives what was written, in the meaning that its writer gave it."""

import pytest

from hyvideo.data.csv_files import csv_text, read_rows
from hyvideo.data.prompts import read_requests


@pytest.mark.parametrize(
    "text",
    [
        "'- a dash",
        "=HYPERLINK(1)",
        "'=a",
        "a line\x0band a page\x0c",
        "a next\x85line",
        "a cat\x07",
        "a, b",
        'a "word"',
        "一只猫",
    ],
)
def test_a_cell_is_read_as_it_was_written(tmp_path, text):
    """Prompts from web pages have line tabulations and next lines; an apostrophe is an apostrophe."""
    path = tmp_path / "rows.csv"
    path.write_text(csv_text(["prompt", "score"], [[text, -0.5], ["next", None]]))
    assert read_rows(path, "a CSV", ["prompt"]) == [
        {"prompt": text, "score": "-0.5"},
        {"prompt": "next", "score": ""},
    ]
    assert [request.prompt for request in read_requests(path)] == [text.strip(), "next"]


def test_an_unclosed_quote_is_reported_by_line(tmp_path):
    (tmp_path / "prompts.csv").write_text('prompt\n"a cat\na dog\n')
    with pytest.raises(ValueError, match="prompts.csv.* line 3"):
        read_requests(tmp_path / "prompts.csv")


def test_a_file_in_another_encoding_is_named(tmp_path):
    """A spreadsheet saves "Unicode text" as UTF-16."""
    (tmp_path / "prompts.csv").write_text("prompt\né\n", encoding="utf-16")
    with pytest.raises(ValueError, match="prompts.csv.*UTF-8"):
        read_requests(tmp_path / "prompts.csv")


@pytest.mark.parametrize("name", ["", "missing.csv"])
def test_a_path_that_is_no_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=str(tmp_path / name)):
        read_requests(tmp_path / name)
