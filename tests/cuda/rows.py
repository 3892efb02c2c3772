"""Rows of results: the pytest plugin that writes them while the tests of a lane run, and their reader.

A test gives one row: ``what``, ``ok``, the values that it recorded, its seconds, and why it failed.
The plugin writes a part of a row at each `record`, and the rest when the test ends. The row of a
test that was killed has what it had recorded, and its ``ok`` is None.
"""

import json
import os
from pathlib import Path

FILE = "CHECK_ROWS"  # environment variable: the file for the rows of a lane
FOLDER = "tests/cuda/"


def name_of(test: str) -> str:
    """Return the name of a test in its row, such as test_speed.py::test_machine, for pytest's ID."""
    return test.removeprefix(FOLDER)


def pytest_runtest_logreport(report) -> None:
    """Write a row for a finished test, and for one whose setup or teardown fails."""
    if report.when != "call" and report.passed:
        return
    row = {"what": name_of(report.nodeid), "ok": report.passed, **dict(report.user_properties)}
    row["seconds"] = report.duration
    if not report.passed:
        row["why"] = str(report.longrepr).splitlines()[-1]
    _append(row)


def record(what: str, name: str, value: object) -> None:
    """Write a value of the row of a test that is still running; no effect outside of a lane."""
    _append({"what": what, name: value})


def _append(row: dict) -> None:
    if FILE in os.environ:
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(row) + "\n")


def read(file: Path) -> list[dict]:
    """Return the rows of a file, in which the parts of a test follow one another; the last line may
    be incomplete.
    """
    rows: dict[str, dict] = {}
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            part = json.loads(line)
            rows.setdefault(part["what"], {"what": part["what"], "ok": None}).update(part)
    return list(rows.values())
