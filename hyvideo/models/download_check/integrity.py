"""Flaws of single files: truncated ones, git-lfs pointers, empty ones, and downloads that were broken off.

Looks at headers and sizes only, so it is as quick for 33 GB as for one kilobyte. Whether a whole file is also the
right one for a model is another question.
"""

import zipfile
from pathlib import Path

from hyvideo.data.outside import parse_json

_POINTER = b"version https://git-lfs.github.com/spec/"
# Names that `hf download`, `modelscope download`, browsers and aria2 give to a file that is not finished.
_UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload")
_MAX_HEADER = 100_000_000  # bytes, safetensors' own limit


def flaw_of(path: Path) -> str | None:
    """Reason why a file is not whole, in words that go on after its name; None for a whole one."""
    if path.stat().st_size == 0:
        return "is empty"
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        return "is a git-lfs pointer, not the file it stands for: download it, or run `git lfs pull`"
    if path.suffix == ".safetensors":
        return _safetensors_flaw(path)
    if path.suffix in {".pt", ".pth", ".bin"}:
        # The directory of a zip archive is at its end: without it the archive was cut off.
        return "is truncated" if start.startswith(b"PK") and not zipfile.is_zipfile(path) else None
    if path.suffix == ".json":
        try:
            parse_json(path.read_text())
        except ValueError as error:
            return f"is not JSON ({error})"
    return None


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


def readable_size(num_bytes: int) -> str:
    """A size as the hubs write it, in powers of a thousand: ``33.3 GB``."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _safetensors_flaw(path: Path) -> str | None:
    """The file is 8 bytes for the header's length, the header, and the tensors up to the largest offset."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size >= 8 and length > _MAX_HEADER:
            return "is no safetensors file"
        header = file.read(length)
    if size < 8 + length:
        return "is truncated" if size < 8 else "is truncated in its header"
    try:
        tensors = {name: entry for name, entry in parse_json(header).items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is no safetensors file"
    if size < end:
        return f"is truncated: {readable_size(size)} of {readable_size(end)}"
    return None if size == end else f"is {size - end} bytes longer than its header says"
