"""Lanes of tests: each is one process with a time limit, and lanes run side by side if the memory of
the GPU suffices.

One process for many tests imports torch and opens the GPU once. Results are written while the lanes
run, so that nothing is lost when a time limit or a signal ends them.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hyvideo.files.text import shorten
from hyvideo.settings.processes import num_cores
from tests.cuda import results, rows

_POLL_S = 0.5
_LOG_BYTES = 2_000_000  # of each lane in gpu.log


class Lane(NamedTuple):
    """Tests that one process runs in this order."""

    tests: list[str]  # pytest's IDs in tests/cuda
    expected: float  # seconds that it should take on an H200
    seconds: float  # time limit
    gib: float | None = None  # GPU memory at its peak; None: it runs alone
    environment: Mapping[str, str] = {}


class RunningLane:
    """A lane whose process has been started, and its result so far.

    Args:
        seconds: Time limit.
        folder: Folder of its rows and its log.
    """

    def __init__(
        self,
        name: str,
        lane: Lane,
        *,
        python: str,
        environment: Mapping[str, str],
        seconds: float,
        folder: Path,
    ):
        self.name, self.lane, self.limit = name, lane, seconds
        self.rows, self.log = folder / f"{name}.jsonl", folder / f"{name}.log"
        self.rows.touch()
        self.start = time.monotonic()
        self.result = {
            "lane": name,
            "ok": None,
            "seconds": 0.0,
            "expected": lane.expected,
            "reason": None,
            "rows": [],
        }
        # Without capture (-s), the log of a killed process is complete.
        options = ["-p", rows.__name__, "-p", "no:cacheprovider", "-s"]
        # Loading plugins takes longer than a small test.
        own = {rows.FILE: str(self.rows), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(
                [python, "-m", "pytest", *options, *(rows.FOLDER + test for test in lane.tests)],
                env={**os.environ, **lane.environment, **environment, **own},
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def poll(self) -> list[dict]:
        """Update the result, end the process if its time is over, and return the rows of tests that
        have finished since the last call.
        """
        seconds = time.monotonic() - self.start
        code = self.process.poll()
        if code is not None:
            self._finish(self._reason(code))
        elif seconds > self.limit:
            self._finish(f"not finished within {self.limit:.3g} s")
        before = sum(row["ok"] is not None for row in self.result["rows"])
        self.result["rows"] = rows.read(self.rows)
        self.result["seconds"] = round(seconds, 1)
        return [row for row in self.result["rows"] if row["ok"] is not None][before:]

    def stop(self) -> None:
        """End the process, and all that it has started, if it runs."""
        if self.result["ok"] is None:
            self._finish("stopped")
            self.result["rows"] = rows.read(self.rows)

    def _finish(self, reason: str | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.result["ok"] = reason is None
        self.result["reason"] = reason

    def _reason(self, code: int) -> str | None:
        """Return why a process that ended with this code has failed, with the last error of its
        log; None if it has passed.
        """
        if code == 0:
            return None
        errors = re.findall(
            r"^(?:E +)?([\w.]*Error\b.*)", self.log.read_text(errors="replace"), re.M
        )
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        return shorten(": ".join([reason, *errors[-1:]]), 400)


def run_lanes(
    lanes: Mapping[str, Lane],
    out: Path,
    work: Path,
    *,
    room: float,
    slowness: float,
    title: str,
    numbers: Sequence[results.Number],
    python: str,
    environment: Mapping[str, str],
    on_row: Callable[[str, dict], None],
) -> list[dict]:
    """Run all lanes and return their results.

    Writes ``gpu.json`` and ``gpu.md`` to ``out`` whenever a test has recorded something, and
    ``gpu.log`` when a lane has ended.

    Args:
        work: Folder for the files of the running lanes.
        room: GiB of the GPU. A lane starts when it fits beside the running ones.
        slowness: Factor of the time limits.
        numbers: What the summary of gpu.md compares.
        python: Interpreter of the lanes.
        environment: Variables of all lanes.
        on_row: Called with the name of a lane and the row of each finished test.
    """
    waiting = dict(lanes)
    started: list[RunningLane] = []
    seen = ""
    try:
        while waiting or any(lane.result["ok"] is None for lane in started):
            running = [lane for lane in started if lane.result["ok"] is None]
            for name, lane in list(waiting.items()):
                if fits(lane, [each.lane for each in running], room):
                    del waiting[name]
                    begun = RunningLane(
                        name,
                        lane,
                        python=python,
                        environment=environment,
                        seconds=slowness * lane.seconds,
                        folder=work,
                    )
                    started.append(begun)
                    running.append(begun)
            time.sleep(_POLL_S)
            for lane in running:
                for row in lane.poll():
                    on_row(lane.name, row)
                if lane.result["ok"] is not None:
                    write_log(out / "gpu.log", started)
            found = [lane.result for lane in started]
            now = repr([(result["ok"], result["rows"]) for result in found])
            if now != seen:
                results.write(out, title, found, numbers)
                seen = now
    finally:  # also after a signal
        for lane in started:
            lane.stop()
        found = [lane.result for lane in started]
        results.write(out, title, found, numbers)
        write_log(out / "gpu.log", started)
    return found


def fits(lane: Lane, running: Sequence[Lane], room: float) -> bool:
    """Return whether a lane may start beside the running ones."""
    if not running:
        return True
    needed = [each.gib for each in (lane, *running)]
    return None not in needed and sum(needed) <= room and len(running) < num_cores()


def write_log(file: Path, started: Sequence[RunningLane]) -> None:
    """Write the end of the output of each lane to one file."""
    with open(file, "wb") as log:
        for lane in started:
            log.write(f"\n===== lane {lane.name} =====\n".encode())
            log.write(lane.log.read_bytes()[-_LOG_BYTES:])
