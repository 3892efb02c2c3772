"""Flaws of single files: truncated ones, git-lfs pointers, empty ones, and downloads that were broken off.

Looks at headers and sizes only, so it is as quick for 33 GB as for one kilobyte. Whether a whole file is also the
right one for a model is another question.
"""

import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hyvideo.data.outside import parse_json

_POINTER = b"version https://git-lfs.github.com/spec/"
# Names that `hf download`, `modelscope download`, browsers and aria2 give to a file that is not finished.
_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload")
_TEMPORARY = "._____temp"  # ModelScope's folder, where files have their final names until they are complete


def flaw_of(path: Path) -> str | None:
    """Reason why a file is not whole, in words that go on after its name; None for a whole one."""
    if path.stat().st_size == 0:
        return "is empty"
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        return "is a git-lfs pointer, not the file it stands for: download it, or run `git lfs pull`"
    try:
        if path.suffix == ".safetensors":
            safe_open(path, framework="np").__exit__(None, None, None)
        elif path.suffix == ".json":
            parse_json(path.read_text())
    except SafetensorError as error:
        return f"is truncated or no safetensors file ({error})"
    except ValueError as error:
        return f"is not JSON ({error})"
    # The directory of a zip archive is at its end: without it the archive was cut off.
    is_cut = path.suffix in {".pt", ".pth", ".bin"} and start.startswith(b"PK") and not zipfile.is_zipfile(path)
    return "is truncated" if is_cut else None


def unfinished_bytes(root: Path, folder: Path) -> int | None:
    """Bytes of the downloads into `folder` that are not finished; None where there are none.

    The programs keep them in the folder or in a hidden one of `root`, the folder that they were given.
    """
    inside = folder.relative_to(root)
    places = folder, root / ".cache/huggingface/download" / inside, root / _TEMPORARY / inside
    files = {path for place in places for path in place.rglob("*") if path.is_file()}
    sizes = [file.stat().st_size for file in files if file.suffix in _UNFINISHED or _TEMPORARY in file.parts]
    return sum(sizes) if sizes else None


def size_of(folder: Path) -> int:
    """Bytes in the folder that are there to stay: without hidden files and unfinished downloads."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
