"""Checks one after another, each in a process of its own with a time limit; what is known is written after each row.

A check is a function that yields rows: dicts with ``what``, numbers or words by name, and ``ok`` where it may be false.
One that raises, dies or takes too long has a reason, and keeps the rows that it gave before.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from hyvideo.data.outside import brief, replacing

Row = dict[str, object]


class Check(NamedTuple):
    """A check, which must be picklable where processes are spawned, and the most that it may take."""

    run: Callable[[], Iterable[Row]]
    seconds: float


def run_checks(
    checks: Mapping[str, Check], out: Path, *, seconds: float, fork: bool, title: str, on_row=lambda check, row: None
) -> bool:
    """Runs all checks and claims that all are well; ``gpu.json``, ``gpu.md`` and a log of each check are in ``out``.

    Args:
        seconds: Of all together; the last get what is left.
        fork: Start from this process as it is, which must not have touched a GPU, not from a new one.
        on_row: Is called with the name of a check and each of its rows.
    """
    context = multiprocessing.get_context("fork" if fork else "spawn")
    end, results = time.monotonic() + seconds, []
    for name, check in checks.items():
        result = {"check": name, "ok": False, "seconds": 0.0, "reason": None, "rows": []}
        results.append(result)
        start = time.monotonic()
        for row in _rows(result, check, out / f"{name}.log", context, min(check.seconds, end - start)):
            on_row(name, row)
            result["rows"].append(row)
            _write(out, title, results)
        result["seconds"] = round(time.monotonic() - start, 1)
        result["ok"] = not result["reason"] and all(row.get("ok", True) for row in result["rows"])
        if result["reason"]:
            on_row(name, {"what": result["reason"], "ok": False})
        _write(out, title, results)
    return all(result["ok"] for result in results)


def _rows(result: dict, check: Check, log: Path, context, seconds: float) -> Iterable[Row]:
    """Rows of a check as they come; then ``result`` has the reason why it did not end well, if there is one."""
    if seconds <= 0:
        result["reason"] = "no time was left"
        return
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(check.run, theirs, log))
    end = time.monotonic() + seconds
    process.start()
    theirs.close()
    try:
        while ours.poll(max(0.0, end - time.monotonic())):
            yield ours.recv()
        result["reason"] = f"no end within {seconds:.3g} s"
    except EOFError:  # the process has ended, or will now
        process.join(10)
        if code := process.exitcode:
            said = re.findall(r"^[\w.]*Error\b.*", log.read_text(errors="replace"), re.M) if log.is_file() else []
            by = f"signal {-code}" if code < 0 else f"exit code {code}"
            result["reason"] = brief(f"{by}: {said[-1]}" if said else by, 400)
    finally:
        _kill(process)


def _kill(process: multiprocessing.Process) -> None:
    """Ends a process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, or has no group yet
        process.kill()
    process.join()


def _in_process(run: Callable[[], Iterable[Row]], rows: Connection, log: Path) -> None:
    os.setsid()
    sys.stdout = sys.stderr = open(log, "w", buffering=1)
    for descriptor in (1, 2):  # of other programs and of libraries
        os.dup2(sys.stdout.fileno(), descriptor)
    for row in run():
        rows.send(row)


def _write(out: Path, title: str, results: list[dict]) -> None:
    lines = [f"# {title}", "", "| check | ok | what | result |", "|---|---|---|---|"]
    for result in results:
        rows = result["rows"] + ([{"what": result["reason"], "ok": False}] if result["reason"] else [])
        for row in rows:
            numbers = ", ".join(f"{k} {_shown(v)}" for k, v in row.items() if k not in ("what", "ok"))
            ok = "yes" if row.get("ok", True) else "**no**"
            lines.append(f"| {result['check']} | {ok} | {_shown(row['what'])} | {numbers} |".replace("\n", " "))
    for name, text in (("gpu.json", json.dumps(results, indent=1)), ("gpu.md", "\n".join(lines) + "\n")):
        with replacing(out / name) as path:
            path.write_text(text)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
