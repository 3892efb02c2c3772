"""Digests of values and files: of the inputs that a run started from, of the files of a checkpoint,
and of the contents that a cache is keyed by.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

_SAMPLES = 64  # of a large file
_SAMPLE_BYTES = 2**16


def digest_of(*values: object) -> str:
    """Return a digest of values that JSON can express; others count by their text."""
    content = json.dumps(values, sort_keys=True, default=str).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_file(path: str | Path) -> str:
    """Return a digest of all bytes of a file. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_large_file(path: str | Path) -> str:
    """Return a digest of the size and 64 evenly spaced samples of a file of weights.

    Other weights of the same shapes differ in some of the samples, also if only a few matrices
    differ. A file of less than 4 MiB is read whole. Raises OSError if it cannot be read.
    """
    size = os.stat(path).st_size
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return digest_file(path)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(path, "rb") as file:
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def digest_weights(paths: Iterable[Path]) -> str:
    """Return a digest of large files, and of all files below folders, with their names.

    Paths that do not exist, hidden files and model cards are left out.
    """
    entries = []
    for path in paths:
        if path.is_file():
            entries.append([path.name, digest_large_file(path)])
        for file in _files_below(path):
            entries.append([file.relative_to(path).as_posix(), digest_large_file(file)])
    return digest_of(entries)


def _files_below(folder: Path) -> list[Path]:
    found = []
    for place, below, names in os.walk(folder, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.suffix != ".md" and path.is_file())
