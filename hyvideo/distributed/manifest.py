"""The manifest of a checkpoint: files, sizes, hashes. Written with it, and checked before it is taken up.

Ranks share the work: each hashes some of the files.
"""

import hashlib
import json
from pathlib import Path

import torch.distributed as dist

from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh

NAME = "manifest.json"
_BLOCK = 2**22  # bytes


def hash_share(folder: Path, mesh: Mesh) -> dict[str, dict]:
    """Size and hash of this rank's share of the files below ``folder``, by path."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: _describe(folder / name) for name in names[mesh.rank :: mesh.world_size] if name != NAME}


def merge(share: dict, mesh: Mesh, group: "dist.ProcessGroup | None" = None) -> dict:
    """The shares of all ranks in one, on every rank. All ranks must call."""
    return {name: value for part in all_objects(share, mesh, group) for name, value in part.items()}


def write(folder: Path, files: dict[str, dict]) -> None:
    (folder / NAME).write_text(json.dumps(files, indent=1, sort_keys=True))


def size_problem(folder: Path) -> str | None:
    """Reason why a checkpoint cannot be whole, by names and sizes alone; None if nothing says so."""
    try:
        files = json.loads((folder / NAME).read_text())
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["size"]:
                return f"{name} has {path.stat().st_size} bytes and should have {entry['size']}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{NAME} cannot be read ({error})"
    return None


def damage(folder: Path, mesh: Mesh) -> str | None:
    """Reason why a checkpoint is not what was written, by sizes and hashes; all ranks must call."""
    problems: dict[str, str] = {}
    if problem := size_problem(folder):
        problems[NAME] = problem
    else:
        files = json.loads((folder / NAME).read_text())
        for name in sorted(files)[mesh.rank :: mesh.world_size]:
            if problem := _content_problem(folder / name, files[name], name):
                problems[name] = problem
    merged = merge(problems, mesh)
    return merged[min(merged)] if merged else None


def _content_problem(path: Path, entry: dict, name: str) -> str | None:
    try:
        return None if _describe(path) == entry else f"{name} is not what was written"
    except OSError as error:  # on one rank: the others must hear of it
        return f"{name} cannot be read ({error.strerror})"


def _describe(path: Path) -> dict:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"size": path.stat().st_size, "blake2b": digest.hexdigest()}
