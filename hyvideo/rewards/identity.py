"""Hashes by which a run notices that a reward model has changed between a stop and a resume."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from hyvideo.data.files import add_samples
from hyvideo.rewards.rewards import SCORERS, code_files

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")


def files_hash(name: str, root: str | Path, options: Mapping[str, object]) -> str:
    """Return a hash of the names, sizes and sampled bytes of the weights of a built-in scorer.

    ``root`` is the checkpoint folder. Returns "" for a scorer without weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    has_files = False
    for folder, path in _files(name, root, options):
        has_files = True
        add_samples(digest, path, str(path.relative_to(folder)))
    return digest.hexdigest() if has_files else ""


def _files(
    name: str, root: str | Path, options: Mapping[str, object]
) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of a scorer's weights and, for each of their files, its path.

    Files beside these folders, such as reference statistics, do not affect the scores.
    """
    if name not in SCORERS:
        return
    entry = SCORERS[name]
    base = Path(options.get("path") or Path(root) / entry.folder)
    folders = [base / part for part in entry.files]
    folders += [Path(value) for key, value in options.items() if key != "path" and _is_dir(value)]
    for folder in folders:
        if folder.is_dir():
            for path in sorted(folder.rglob("*")):
                if path.suffix in _SUFFIXES and path.is_file():
                    yield folder, path


def _is_dir(value: object) -> bool:
    return isinstance(value, str) and Path(value).is_dir()


def scorer_identity(name: str, root: str | Path, options: Mapping[str, object]) -> str:
    """Return a hash of all that decides the scores of a scorer: its class, its options, its code
    if it is a custom class, and its weights. Folders may move.
    """
    values = {key: value for key, value in options.items() if key != "path" and not _is_dir(value)}
    digest = hashlib.blake2b(name.rpartition("/")[2].encode(), digest_size=16)
    digest.update(json.dumps(values, sort_keys=True, default=str).encode())
    for path in code_files([name]):
        digest.update(path.read_bytes())
    digest.update(files_hash(name, root, options).encode())
    return digest.hexdigest()
