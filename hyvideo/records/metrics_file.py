"""Reading and writing of metrics.jsonl: one JSON object per iteration; iteration 0 has the base's
validation only.
"""

import json
import os
from pathlib import Path

from hyvideo.files.files import optional, publish


def complete_lines(path: Path) -> list[tuple[int, bytes]]:
    """Return iteration and text of each line, without a last one that a killed process left
    incomplete.
    """
    return [(content["iteration"], line) for line, content in _parsed_lines(path)]


def read_metrics(path: Path) -> list[dict]:
    """Return the metrics of each iteration, without the base model's."""
    return [content for _, content in _parsed_lines(path) if content["iteration"] > 0]


def _parsed_lines(path: Path) -> list[tuple[bytes, dict]]:
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    return [(line, json.loads(line)) for line in complete.splitlines()]


class Lines:
    """Appends lines to metrics.jsonl.

    If the disk is full, a warning is printed and the line is retried with the next.

    A resumed run drops the lines after ``resume_iteration``; a new run has None.
    """

    def __init__(self, path: Path, resume_iteration: int | None):
        if resume_iteration is not None:
            _drop_later_lines(path, resume_iteration)
        self.path = path
        self._file = path.open("ab", buffering=0)  # lines reach the system immediately
        self._waiting = b""

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        with optional(self.path.name):
            self._write_waiting()

    def close(self) -> None:
        with optional(f"the last lines of {self.path.name}"):
            self._write_waiting()
        self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting:  # a nearly full disk may accept only a part
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        os.fsync(self._file.fileno())  # before the checkpoint of this iteration


def _drop_later_lines(path: Path, last: int) -> None:
    """Remove the lines after iteration ``last``."""
    if not path.exists():
        return  # a run that begins with the checkpoint of another run
    kept = [line for iteration, line in complete_lines(path) if iteration <= last]
    with publish(path) as hidden:  # a crash here loses no lines
        hidden.write_bytes(b"".join(line + b"\n" for line in kept))
