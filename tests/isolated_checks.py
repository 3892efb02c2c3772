"""Selections of tests, each run in a separate process with a time limit. Results are written after each of them.

A test gives one row: ``what``, ``ok``, its recorded properties, its seconds, and why it failed. This module is also the
pytest plugin that writes a row when a test ends, so that the rows are kept if the process dies or times out.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hyvideo.data.outside import replacing, shorten

_ROWS = "CHECK_ROWS"  # environment variable: the file for a check's rows


class Check(NamedTuple):
    """Arguments of pytest, their time limit in seconds, and additional environment variables."""

    arguments: list[str]
    seconds: float
    environment: Mapping[str, str] = {}


def run_checks(
    checks: Mapping[str, Check],
    out: Path,
    *,
    seconds: float,
    title: str,
    on_row: Callable[[str, dict], None],
    python: str = sys.executable,
) -> bool:
    """Run all checks and return whether all passed. Writes ``gpu.json``, ``gpu.md``, rows and logs to ``out``.

    Args:
        seconds: Time limit of all checks together.
        on_row: Called with the name of a finished check and each of its rows.
        python: Interpreter of the checks.
    """
    end, results = time.monotonic() + seconds, []
    for name, check in checks.items():
        start, lines = time.monotonic(), out / f"{name}.jsonl"
        lines.write_text("")
        reason = _run(python, check, lines, out / f"{name}.log", min(check.seconds, end - start))
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        seconds_taken = round(time.monotonic() - start, 1)
        results.append({"check": name, "ok": not reason, "seconds": seconds_taken, "reason": reason, "rows": rows})
        for row in _with_reason(results[-1]):
            on_row(name, row)
        _write(out, title, results)
    return all(result["ok"] for result in results)


def _run(python: str, check: Check, rows: Path, log: Path, seconds: float) -> str | None:
    """Run a check. Return None if all tests passed, else the reason of the failure."""
    if seconds <= 0:
        return "no time was left"
    command = [python, "-m", "pytest", "-p", __name__, "-p", "no:cacheprovider", *check.arguments]
    no_plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # loading them takes longer than a small check
    environment = os.environ | check.environment | no_plugins | {_ROWS: str(rows.resolve())}
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not finished within {seconds:.3g} s"
    finally:  # including the processes that it started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    errors = re.findall(r"^(?:E +)?([\w.]*Error\b.*)", log.read_text(errors="replace"), re.M)
    reason = f"signal {-code}" if code < 0 else f"exit code {code}"
    return shorten(": ".join([reason, *errors[-1:]]), 400) if code else None


def pytest_runtest_logreport(report) -> None:
    """Write a row for a finished test, and for one whose setup or teardown fails."""
    if report.when != "call" and report.passed:
        return
    row = {"what": report.nodeid.split("::")[-1], "ok": report.passed} | dict(report.user_properties)
    row |= {"seconds": report.duration} | ({} if report.passed else {"why": str(report.longrepr).splitlines()[-1]})
    with open(os.environ[_ROWS], "a") as file:
        file.write(json.dumps(row) + "\n")


def _with_reason(result: dict) -> list[dict]:
    return result["rows"] + ([{"what": result["reason"], "ok": False}] if result["reason"] else [])


def _write(out: Path, title: str, results: list[dict]) -> None:
    lines = [f"# {title}", "", "| check | ok | what | result |", "|---|---|---|---|"]
    for result in results:
        for row in _with_reason(result):
            numbers = ", ".join(f"{k} {_text(v)}" for k, v in row.items() if k not in ("what", "ok"))
            ok = "yes" if row["ok"] else "**no**"
            lines.append(f"| {result['check']} | {ok} | {_text(row['what'])} | {numbers} |".replace("\n", " "))
    for name, text in (("gpu.json", json.dumps(results, indent=1)), ("gpu.md", "\n".join(lines) + "\n")):
        with replacing(out / name) as path:
            path.write_text(text)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
