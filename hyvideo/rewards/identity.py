"""Digests by which a run notices that a reward model has changed between a stop and a resume."""

from collections.abc import Mapping
from pathlib import Path

from hyvideo.files.custom_code import code_files
from hyvideo.files.digests import digest_file, digest_of, digest_weights
from hyvideo.rewards.rewards import SCORERS


def files_hash(name: str, root: str | Path, options: Mapping[str, object]) -> str:
    """Return a digest of the weights of a built-in scorer; "" for a scorer without weights.

    ``root`` is the checkpoint folder.
    """
    folders = _folders(name, root, options)
    return digest_weights(folders) if folders else ""


def _folders(name: str, root: str | Path, options: Mapping[str, object]) -> list[Path]:
    """Return the folders of a scorer's weights.

    Files beside them, such as reference statistics, do not affect the scores.
    """
    if name not in SCORERS:
        return []
    entry = SCORERS[name]
    base = Path(options.get("path") or Path(root) / entry.folder)
    given = [Path(value) for key, value in options.items() if key != "path" and _is_dir(value)]
    return [path for path in (*(base / part for part in entry.files), *given) if path.is_dir()]


def _is_dir(value: object) -> bool:
    return isinstance(value, str) and Path(value).is_dir()


def scorer_identity(name: str, root: str | Path, options: Mapping[str, object]) -> str:
    """Return a digest of all that decides the scores of a scorer: its class, its options, its code
    if it is a custom one, and its weights. Folders may move.
    """
    values = {key: value for key, value in options.items() if key != "path" and not _is_dir(value)}
    code = [digest_file(path) for path in code_files([name])]
    return digest_of(name.rpartition("/")[2], values, code, files_hash(name, root, options))
