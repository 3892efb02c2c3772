"""Manifest of a checkpoint: names, sizes and hashes of its files, written with it and verified
before resuming.
"""

import hashlib
import json
import os
import stat
from collections import ChainMap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hyvideo.distributed.collectives import (
    all_objects,
    first_reason,
    name_ranks,
    raise_on_all_ranks,
)
from hyvideo.distributed.mesh import Mesh

NAME = "manifest.json"
NEEDED = ("state.json", "tensors/.metadata")  # files of every checkpoint


def hash_share(folder: Path, mesh: Mesh) -> dict[str, dict]:
    """Return the size and hash of each file of this rank's share of ``folder``, by
    relative path.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {
        name: _describe(folder / name)
        for name in names[mesh.rank :: mesh.world_size]
        if name != NAME
    }


def write(folder: Path, shares: list[dict[str, dict]]) -> None:
    (folder / NAME).write_text(json.dumps(dict(ChainMap(*shares)), indent=1, sort_keys=True))


def manifest_hash(folder: Path) -> str:
    """Return the hash of the manifest, which identifies the checkpoint."""
    return hashlib.blake2b((folder / NAME).read_bytes(), digest_size=8).hexdigest()


def size_problem(folder: Path) -> str | None:
    """Return why names or sizes differ from the manifest, or None.

    Raises ValueError if a file cannot be read.
    """
    name = NAME
    try:
        if (folder / NAME).is_fifo():
            return f"{NAME} is a pipe"
        files = json.loads((folder / NAME).read_text())
        for name, entry in files.items():
            found = (folder / name).stat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a regular file"
            if found.st_size != entry["size"]:
                return f"{name} has {found.st_size} bytes, expected {entry['size']}"
        if absent := [name for name in NEEDED if name not in files]:
            return f"{NAME} does not list {', '.join(absent)}"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        raise _unreadable(folder / name, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{NAME} is invalid ({error})"
    return None


def corruption(folder: Path, mesh: Mesh) -> str | None:
    """Return why sizes or hashes differ from the manifest, or None.

    Collective; ValueError for unreadable files.
    """
    problem = None
    with raise_on_all_ranks(mesh):
        problem = size_problem(folder)
    problems = all_objects(problem, mesh)
    if all(problems):
        return problems[0]
    if any(problems):
        complete, incomplete = (
            name_ranks(rank for rank, found in enumerate(problems) if bool(found) is is_bad)
            for is_bad in (False, True)
        )
        raise ValueError(
            f"all ranks must see the same checkpoint {folder}: it is complete on {complete}, but "
            f"on {incomplete}: {next(filter(None, problems))}; restart when all nodes see the same "
            "output_dir"
        )
    with raise_on_all_ranks(mesh):
        files = json.loads((folder / NAME).read_text())
        share = sorted(files)[mesh.rank :: mesh.world_size]
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            problems = pool.map(
                lambda name: _content_problem(folder / name, files[name], name), share
            )
            problem = next(filter(None, problems), None)
    return first_reason(problem, mesh)


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files and of all files below folders, without
    hidden and missing ones.

    The manifest's hash is used for a file that has the size in the manifest and is not newer than
    it.
    """
    names = [(path, file) for path in paths for file in _files_below(path)]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL: 57 GB of weights at disk speed
        entries = list(pool.map(_describe_unless_known, (file for _, file in names)))
    content = [
        [file.relative_to(path).as_posix(), entry] for (path, file), entry in zip(names, entries)
    ]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = []
    for folder, below, names in os.walk(path, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        files += [Path(folder) / name for name in names if not name.startswith(".")]
    return sorted(files)


def _describe_unless_known(file: Path) -> dict:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would never end
        raise ValueError(
            f"{file} must be a regular file, got a pipe or a device; replace it by a copy of its "
            "contents"
        )
    for folder in file.parents[:3]:
        manifest = folder / NAME
        if manifest.is_file() and manifest != file:
            entry = _entries(manifest).get(file.relative_to(folder).as_posix())
            is_older = found.st_mtime_ns <= manifest.stat().st_mtime_ns
            if isinstance(entry, dict) and entry.get("size") == found.st_size and is_older:
                return entry
    return _describe(file)


def _entries(manifest: Path) -> dict:
    """Return the entries of a manifest, or none if it is corrupted, as `corruption` reports."""
    try:
        content = json.loads(manifest.read_text())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _content_problem(path: Path, entry: dict, name: str) -> str | None:
    try:
        return None if _describe(path) == entry else f"the contents of {name} have changed"
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{path} cannot be read ({error.strerror}); it may be intact: fix the file system and "
        "restart"
    )


def _describe(path: Path) -> dict:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return {"size": path.stat().st_size, "blake2b": digest.hexdigest()}
