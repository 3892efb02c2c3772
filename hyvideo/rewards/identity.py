"""Digests by which a run notices that a reward model has changed between a stop and a resume."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from hyvideo.data.custom_code import code_files
from hyvideo.data.digests import digest_file, digest_of, digest_weights, files_below
from hyvideo.rewards.rewards import SCORERS

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")


def files_hash(name: str, root: str | Path, options: Mapping[str, object]) -> str:
    """Return a digest of the weights of a built-in scorer; "" for a scorer without weights.

    ``root`` is the checkpoint folder.
    """
    files = list(_files(name, root, options))
    return digest_weights(files) if files else ""


def _files(name: str, root: str | Path, options: Mapping[str, object]) -> Iterator[Path]:
    """Yield the files of a scorer's weights.

    Files beside their folders, such as reference statistics, do not affect the scores.
    """
    if name not in SCORERS:
        return
    entry = SCORERS[name]
    base = Path(options.get("path") or Path(root) / entry.folder)
    folders = [base / part for part in entry.files]
    folders += [Path(value) for key, value in options.items() if key != "path" and _is_dir(value)]
    for folder in folders:
        if folder.is_dir():
            yield from (path for path in files_below(folder) if path.suffix in _SUFFIXES)


def _is_dir(value: object) -> bool:
    return isinstance(value, str) and Path(value).is_dir()


def scorer_identity(name: str, root: str | Path, options: Mapping[str, object]) -> str:
    """Return a digest of all that decides the scores of a scorer: its class, its options, its code
    if it is a custom one, and its weights. Folders may move.
    """
    values = {key: value for key, value in options.items() if key != "path" and not _is_dir(value)}
    code = [digest_file(path) for path in code_files([name])]
    return digest_of(name.rpartition("/")[2], values, code, files_hash(name, root, options))
