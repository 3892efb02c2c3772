"""Selections of tests, each run in a separate process with a time limit.

Results are written while they run.

A test gives one row: ``what``, ``ok``, its recorded properties, its seconds, and why it failed.
This module is also the pytest plugin that writes the rows: a part of a row at each `record`, and
the rest when the test ends. A row of a test that was killed has what it had recorded, and ``ok`` is
None.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hyvideo.files.files import publish
from hyvideo.files.text import shorten

_ROWS = "CHECK_ROWS"  # environment variable: the file for a check's rows
_POLL_S = 0.5


class Check(NamedTuple):
    """A selection of tests."""

    arguments: list[str]  # of pytest
    expected: float  # seconds that it should take on an H200
    seconds: float  # time limit
    configs: list[str] = []  # configs whose sizes or settings it runs
    environment: Mapping[str, str] = {}


class Number(NamedTuple):
    """A measured number of the summary, its expected range, and what to do outside of it."""

    title: str
    check: str
    row: str  # regular expression for the test
    value: str  # name of the recorded value
    expected: str
    low: float
    high: float
    advice: str

    def values(self, results: list[dict]) -> list[float]:
        rows = [
            row for result in results if result["check"] == self.check for row in result["rows"]
        ]
        values = [row.get(self.value) for row in rows if re.fullmatch(self.row, row["what"])]
        return [value for value in values if isinstance(value, int | float)]


def run_checks(
    checks: Mapping[str, Check],
    out: Path,
    work: Path,
    *,
    seconds: float,
    title: str,
    numbers: Sequence[Number] = (),
    on_row: Callable[[str, dict], None],
    python: str = sys.executable,
) -> bool:
    """Run all checks and return whether all passed.

    Writes ``gpu.json`` and ``gpu.md`` to ``out`` whenever a row has changed, and the output of all
    checks to ``gpu.log``. The rows themselves are in ``rows/<check>.jsonl`` of ``work``.

    Args:
        work: Folder of the rows and of the files that the checks leave.
        seconds: Time limit of all checks together.
        numbers: What the summary of gpu.md compares.
        on_row: Called with the name of a check and each of its finished rows.
        python: Interpreter of the checks.
    """
    end = time.monotonic() + seconds
    results: list[dict] = []
    (work / "rows").mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").write_text("")
    for name, check in checks.items():
        start = time.monotonic()
        lines = work / "rows" / f"{name}.jsonl"
        lines.write_text("")
        result = {
            "check": name,
            "ok": None,
            "seconds": 0.0,
            "expected": check.expected,
            "reason": None,
            "rows": [],
        }
        results.append(result)
        shown = 0

        def update(result=result, lines=lines, start=start, name=name):
            nonlocal shown
            rows = _read_rows(lines)
            if rows == result["rows"]:
                return
            result["rows"] = rows
            result["seconds"] = round(time.monotonic() - start, 1)
            _write(out, title, results, numbers)
            finished = [row for row in rows if row["ok"] is not None]
            for row in finished[shown:]:
                on_row(name, row)
            shown = len(finished)

        result["reason"] = _run(
            python, check, lines, out / "gpu.log", min(check.seconds, end - start), update
        )
        update()
        result["ok"] = not result["reason"]
        result["seconds"] = round(time.monotonic() - start, 1)
        for row in [*(row for row in result["rows"] if row["ok"] is None), *_reason_rows(result)]:
            on_row(name, row)
        _write(out, title, results, numbers)
    return all(result["ok"] for result in results)


def _read_rows(lines: Path) -> list[dict]:
    """Return the rows of a file, in which the parts of a test follow one another; the last line may
    be incomplete.
    """
    rows: dict[str, dict] = {}
    for line in lines.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            part = json.loads(line)
            rows.setdefault(part["what"], {"what": part["what"], "ok": None}).update(part)
    return list(rows.values())


def _run(
    python: str, check: Check, rows: Path, log: Path, seconds: float, on_wait: Callable[[], None]
) -> str | None:
    """Run a check, calling ``on_wait`` twice a second.

    Return None if all tests passed, else the reason.
    """
    if seconds <= 0:
        return "no time was left"
    # Without capture (-s), the log of a killed check is complete.
    command = [
        python,
        "-m",
        "pytest",
        "-p",
        __name__,
        "-p",
        "no:cacheprovider",
        "-s",
        *check.arguments,
    ]
    # loading them takes longer than a small check
    no_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = os.environ | check.environment | no_plugins | {_ROWS: str(rows.resolve())}
    with open(log, "a") as output:
        before = output.tell()
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    end = time.monotonic() + seconds
    try:
        while (code := process.poll()) is None:
            if time.monotonic() > end:
                return f"not finished within {seconds:.3g} s"
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(_POLL_S, max(end - time.monotonic(), 0)))
            on_wait()
    finally:  # including the processes that it started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    written = log.read_bytes()[before:].decode(errors="replace")
    errors = re.findall(r"^(?:E +)?([\w.]*Error\b.*)", written, re.M)
    reason = f"signal {-code}" if code < 0 else f"exit code {code}"
    return shorten(": ".join([reason, *errors[-1:]]), 400) if code else None


def pytest_runtest_logreport(report) -> None:
    """Write a row for a finished test, and for one whose setup or teardown fails."""
    if report.when != "call" and report.passed:
        return
    row = {"what": report.nodeid.split("::")[-1], "ok": report.passed} | dict(
        report.user_properties
    )
    row |= {"seconds": report.duration} | (
        {} if report.passed else {"why": str(report.longrepr).splitlines()[-1]}
    )
    _append(row)


def record(what: str, name: str, value: object) -> None:
    """Write a value of the row of a test that is still running, if `run_checks` started this
    process.
    """
    _append({"what": what, name: value})


def _append(row: dict) -> None:
    if _ROWS in os.environ:
        with open(os.environ[_ROWS], "a") as file:
            file.write(json.dumps(row) + "\n")


def _reason_rows(result: dict) -> list[dict]:
    return [{"what": result["reason"], "ok": False}] if result["reason"] else []


def _write(out: Path, title: str, results: list[dict], numbers: Sequence[Number]) -> None:
    lines = [f"# {title}", "", *_summary(results, numbers)]
    lines += ["| check | seconds | expected |", "|---|---|---|"]
    lines += [
        f"| {each['check']} | {each['seconds']:.0f} | {each['expected']:.0f} |" for each in results
    ]
    lines += ["", "| check | ok | what | result |", "|---|---|---|---|"]
    for result in results:
        for row in [*result["rows"], *_reason_rows(result)]:
            values = ", ".join(f"{k} {_text(v)}" for k, v in row.items() if k not in ("what", "ok"))
            ok = {True: "yes", False: "**no**", None: "unfinished"}[row["ok"]]
            lines.append(
                f"| {result['check']} | {ok} | {_text(row['what'])} | {values} |".replace("\n", " ")
            )
    for name, text in (
        ("gpu.json", json.dumps(results, indent=1)),
        ("gpu.md", "\n".join(lines) + "\n"),
    ):
        with publish(out / name) as path:
            path.write_text(text)


def _summary(results: list[dict], numbers: Sequence[Number]) -> list[str]:
    """Return the table of measured numbers beside the expected ones, with what to do if one is out
    of range.
    """
    lines = []
    for number in numbers:
        for value in number.values(results):
            advice = "" if number.low <= value <= number.high else number.advice
            lines.append(f"| {number.title} | {value:.3g} | {number.expected} | {advice} |")
    if not lines:
        return []
    return ["| number | measured | expected | if it differs |", "|---|---|---|---|", *lines, ""]


def summary(out: Path, numbers: Sequence[Number]) -> str:
    """Return the summary of the results in ``out`` as text."""
    return "\n".join(_summary(json.loads((out / "gpu.json").read_text()), numbers))


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
