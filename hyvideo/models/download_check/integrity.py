"""Integrity checks of single files by header and size: truncated files, git-lfs pointers and unfinished downloads."""

import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hyvideo.data.outside import parse_json

_POINTER = b"version https://git-lfs.github.com/spec/"
# Suffixes that `hf download`, `modelscope download`, browsers and aria2 give to unfinished files.
_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload")
_TEMPORARY = "._____temp"  # ModelScope's folder for unfinished files, which already have their final names


def file_problem(path: Path) -> str | None:
    """Return the problem of a file as a phrase such as "is empty", or None if the file is complete."""
    if path.stat().st_size == 0:
        return "is empty"
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        return "is a git-lfs pointer, not the file itself: download the file or run `git lfs pull`"
    try:
        if path.suffix == ".safetensors":
            safe_open(path, framework="np").__exit__(None, None, None)
        elif path.suffix == ".json":
            parse_json(path.read_text())
    except SafetensorError as error:
        return f"is truncated or not a safetensors file ({error})"
    except ValueError as error:
        return f"is not valid JSON ({error})"
    # A zip archive ends with its directory; a truncated one has none.
    is_truncated = path.suffix in {".pt", ".pth", ".bin"} and start.startswith(b"PK") and not zipfile.is_zipfile(path)
    return "is truncated" if is_truncated else None


def unfinished_bytes(root: Path, folder: Path) -> int | None:
    """Return the bytes of unfinished downloads into `folder`, there or hidden in `root`; None without any."""
    inside = folder.relative_to(root)
    folders = folder, root / ".cache/huggingface/download" / inside, root / _TEMPORARY / inside
    files = {path for parent in folders for path in parent.rglob("*") if path.is_file()}
    sizes = [file.stat().st_size for file in files if file.suffix in _UNFINISHED or _TEMPORARY in file.parts]
    return sum(sizes) if sizes else None


def size_of(folder: Path) -> int:
    """Return the size of a folder in bytes, without hidden files and unfinished downloads."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
