"""Reading and writing of metrics.jsonl: one JSON object per iteration; iteration 0 has the base's
validation only.
"""

import os
import sys
from pathlib import Path

from hyvideo.data.files import file_problem, parse_json, publish
from hyvideo.data.text import quote


def iteration_of(line: bytes) -> int | None:
    """Return the iteration of a line of metrics.jsonl, or None if the line is incomplete."""
    content = _parse(line)
    return content["iteration"] if content else None


def _parse(line: bytes) -> dict | None:
    """Return the content of a line with its iteration, or None if the line is incomplete."""
    try:
        content = parse_json(line.decode())
        iteration = content["iteration"]
    except (ValueError, TypeError, KeyError):
        return None
    return content if type(iteration) is int and iteration >= 0 else None


def complete_lines(path: Path) -> list[tuple[int, bytes]]:
    """Return iteration and text of each line, without an incomplete last one.

    Raises ValueError for an invalid file, also if a line repeats an iteration: its cost would count
    twice.
    """
    return [(content["iteration"], line) for line, content in _parsed_lines(path)]


def read_metrics(path: Path) -> list[dict]:
    """Return the metrics of each iteration, without the base model's.

    Raises ValueError like `complete_lines`, and for a metric that is not a number, a list or null.
    """
    metrics = [content for _, content in _parsed_lines(path) if content["iteration"] > 0]
    for line in metrics:
        for name, value in line.items():
            if not isinstance(value, int | float | list | None):
                raise ValueError(
                    f"{path}: {quote(name)} of iteration {line['iteration']} must be a number, a "
                    f"list or null, got {quote(value)}; restore the line"
                )
    return metrics


def _parsed_lines(path: Path) -> list[tuple[bytes, dict]]:
    """Return text and content of each line, without an incomplete last one. Raises ValueError like
    `complete_lines`.

    Each is parsed once: a long run has tens of megabytes.
    """
    problem = file_problem(path)
    if problem:
        raise ValueError(f"{path} must be readable to resume or evaluate the run: {problem}")
    lines = path.read_bytes().splitlines()
    contents = [_parse(line) for line in lines]
    if None in contents[:-1]:
        number = contents.index(None) + 1
        raise ValueError(
            f"line {number} of {path} is not a JSON object with an iteration; repair or remove the "
            "line"
        )
    last = 0
    for number, content in enumerate(contents, start=1):
        iteration = content["iteration"] if content else 0
        if iteration and iteration <= last:
            raise ValueError(
                f"line {number} of {path} has iteration {iteration}, but follows iteration {last}; "
                "every iteration has one line, in order: remove the lines that do not belong to "
                "the run"
            )
        last = iteration or last
    return [(line, content) for line, content in zip(lines, contents) if content is not None]


class Lines:
    """Appends lines to metrics.jsonl.

    If the disk is full, a warning is printed and the line is retried with the next.

    A resumed run drops the lines after ``resume_iteration``. Raises ValueError if a new run (None)
    would append to others.
    """

    def __init__(self, path: Path, resume_iteration: int | None):
        if resume_iteration is not None and path.exists():
            lines = [each for each in complete_lines(path) if each[0] <= resume_iteration]
            kept = [line for _, line in lines]
            numbers = [number for number, _ in lines]
            # a run that began with the checkpoint of another run has no lines of earlier iterations
            first = max(1, min(numbers, default=1))
            if missing := set(range(first, resume_iteration + 1)) - set(numbers):
                print(
                    f"warning: {path} has no line of {len(missing)} of the {resume_iteration} "
                    f"finished iterations, such as {min(missing)}; training continues without them",
                    file=sys.stderr,
                    flush=True,
                )
            with publish(path) as aside:  # a crash here loses no lines
                aside.write_bytes(b"".join(line + b"\n" for line in kept))
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
        if problem := self._write_waiting():
            print(
                f"\nMETRICS NOT WRITTEN YET ({problem}); training continues",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if problem := self._write_waiting():
            lost = self._waiting.count(b"\n")
            print(
                f"\nMETRICS LOST: {lost} lines of {self.path} ({problem})",
                file=sys.stderr,
                flush=True,
            )
        self._file.close()

    def _write_waiting(self) -> OSError | None:
        try:
            while self._waiting:  # a nearly full disk may accept only a part
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            os.fsync(self._file.fileno())  # before the checkpoint of this iteration
        except OSError as error:
            return error
        return None
