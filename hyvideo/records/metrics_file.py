"""The file metrics.jsonl: a line for each iteration, read again by a run that goes on and by its evaluation."""

import os
import sys
from pathlib import Path

from hyvideo.data.outside import parse_json, replacing


def iteration_of(line: bytes) -> int | None:
    """The iteration of a line of metrics.jsonl, None where the line is not whole."""
    try:
        iteration = parse_json(line.decode())["iteration"]
    except (ValueError, TypeError, KeyError):
        return None
    return iteration if isinstance(iteration, int) else None


def whole_lines(path: Path) -> list[tuple[int, bytes]]:
    """Iteration and text of each line but a torn last one. ValueError for another broken line or an unreadable file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} must be a readable file, to go on with its run ({error.strerror})") from error
    iterations = [iteration_of(line) for line in lines]
    if None in iterations[:-1]:
        number = iterations.index(None) + 1
        raise ValueError(f"line {number} of {path} is not a JSON object with an iteration; repair or remove it")
    return [(iteration, line) for iteration, line in zip(iterations, lines) if iteration is not None]


class Lines:
    """Appends lines to metrics.jsonl. What a full disk does not take is reported, and written with the next line.

    Of a run that goes on after ``resume_iteration``, what is logged again is dropped. Raises ValueError where a new run
    (None) would be appended to another's lines, and as `whole_lines`.
    """

    def __init__(self, path: Path, resume_iteration: int | None):
        if resume_iteration is not None and path.exists():
            kept = [line for iteration, line in whole_lines(path) if iteration <= resume_iteration]
            with replacing(path) as aside:  # a second crash loses nothing
                aside.write_bytes(b"".join(line + b"\n" for line in kept))
        elif path.exists() and path.stat().st_size > 0:
            raise ValueError(f"{path} holds the metrics of another run; resume that one or choose another output_dir")
        self.path = path
        self._file = path.open("ab", buffering=0)  # lines leave the process at once
        self._waiting = b""

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        if problem := self._write_waiting():
            print(f"\nMETRICS NOT WRITTEN YET ({problem}); training goes on", file=sys.stderr, flush=True)

    def close(self) -> None:
        if problem := self._write_waiting():
            lost = self._waiting.count(b"\n")
            print(f"\nMETRICS LOST: {lost} lines of {self.path} ({problem})", file=sys.stderr, flush=True)
        self._file.close()

    def _write_waiting(self) -> OSError | None:
        try:
            while self._waiting:  # a disk may take a part
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            os.fsync(self._file.fileno())  # before the checkpoint that counts on it
        except OSError as error:
            return error
        return None
