"""Reading and writing of metrics.jsonl: one JSON object per iteration; iteration 0 has the base's
validation only.
"""

import json
import os
import sys
from pathlib import Path

from hyvideo.data.files import optional, publish
from hyvideo.data.run_folder import CHECKPOINTS


def complete_lines(path: Path) -> list[tuple[int, bytes]]:
    """Return iteration and text of each line, without an incomplete last one.

    Raises ValueError if the file cannot be read, or has a broken line before the last.
    """
    return [(content["iteration"], line) for line, content in _parsed_lines(path)]


def read_metrics(path: Path) -> list[dict]:
    """Return the metrics of each iteration, without the base model's.

    Raises ValueError like `complete_lines`.
    """
    return [content for _, content in _parsed_lines(path) if content["iteration"] > 0]


def _parsed_lines(path: Path) -> list[tuple[bytes, dict]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"{path} must be readable to resume or evaluate the run: {error.strerror}"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            content["iteration"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # the process ended while it was written
                break
            raise ValueError(
                f"line {number} of {path} is not a JSON object with an iteration; repair or remove "
                "the line"
            ) from error
        found.append((line, content))
    return found


class Lines:
    """Appends lines to metrics.jsonl.

    If the disk is full, a warning is printed and the line is retried with the next.

    A resumed run drops the lines after ``resume_iteration``. Raises ValueError if a new run (None)
    would append to others.
    """

    def __init__(self, path: Path, resume_iteration: int | None):
        if resume_iteration is not None:
            _drop_later_lines(path, resume_iteration)
        elif path.exists() and path.stat().st_size > 0:
            raise ValueError(
                f"{path} contains the metrics of another run; resume that run or set another "
                "output_dir"
            )
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
    """Remove the lines after iteration ``last``; warn if earlier ones are missing."""
    if not path.exists() and not (path.parent / CHECKPOINTS).exists():
        return  # a run that begins with the checkpoint of another run
    lines = complete_lines(path) if path.exists() else []
    kept = {iteration: line for iteration, line in lines if iteration <= last}
    # one that began with the checkpoint of another run has no lines of earlier iterations
    first = max(1, min(kept, default=1))
    missing = set(range(first, last + 1)) - set(kept)
    if missing:
        print(
            f"warning: {path} has no line of {len(missing)} of the {last} finished iterations, such "
            f"as {min(missing)}; the run continues without them",
            file=sys.stderr,
            flush=True,
        )
    if lines:
        with publish(path) as hidden:  # a crash here loses no lines
            hidden.write_bytes(b"".join(line + b"\n" for line in kept.values()))
