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
_UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload")


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


def shards(index: Path) -> list[Path]:
    """The weight files that a ``*.safetensors.index.json`` names; none where it cannot be read."""
    try:
        names = set(parse_json(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [index.parent / name for name in sorted(names)]


def unfinished_bytes(root: Path, folder: Path) -> int | None:
    """Bytes of the downloads into `folder` that are not finished; None where there are none.

    The programs keep them in the folder or in a hidden one of `root`, the folder that they were given.
    """
    inside = folder.relative_to(root)
    named = [folder, root / ".cache/huggingface/download" / inside]
    # ModelScope keeps the final names in a folder of its own until they are complete.
    temporary = [root / "._____temp" / inside, folder / "._____temp"]
    paths = {path for place in named for pattern in _UNFINISHED for path in place.rglob(pattern)}
    paths |= {path for place in temporary for path in place.rglob("*")}
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    return sum(sizes) if sizes else None


def size_of(folder: Path) -> int:
    """Bytes in the folder that are there to stay: without hidden files and unfinished downloads."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
