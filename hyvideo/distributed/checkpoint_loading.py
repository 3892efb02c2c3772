"""Checkpoints of a run on disk: which one is complete, and loading of its tensors by any number of
ranks.

    checkpoints/000050/digests.json    digest of every file below; written last, before the rename
                       state.json      counters, settings and inputs of the run
                       model.json      class and configuration of the transformer
                       tensors/        torch.distributed.checkpoint
                       lora/           of LoRA training
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hyvideo.data.digests import digest_file
from hyvideo.data.run_folder import CHECKPOINTS, DIGESTS, MARK, numbered
from hyvideo.distributed.checkpoint_reader import SafeReader, read_shapes
from hyvideo.distributed.collectives import first_reason, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import assign_ranks, local_shard, replica_group

TENSORS = "tensors"
STATE = "state.json"


def read_state(folder: Path) -> dict[str, Any]:
    """Return the contents of state.json."""
    return json.loads((folder / STATE).read_bytes())


# --- complete and corrupted checkpoints -----------------------------------------------------------


def complete(output_dir: Path) -> list[Path]:
    """Return the checkpoints that were written to their end, oldest first."""
    return [path for _, path in numbered(output_dir, CHECKPOINTS) if (path / DIGESTS).is_file()]


def digest_files(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> dict[str, str]:
    """Return the digests of this rank's share of the files of a checkpoint, by relative path."""
    left_out = (DIGESTS, MARK)  # a copy may lack the hidden mark
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name not in left_out
    )
    own = files[rank::num_ranks]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        digests = list(pool.map(digest_file, own))
    return {str(path.relative_to(folder)): digest for path, digest in zip(own, digests)}


def corruption(folder: Path, mesh: Mesh) -> str | None:
    """Return why the files of a checkpoint differ from what was written; None if they do not.

    Reads all bytes, divided among the ranks, which must see the same folder. Collective. Raises
    OSError, on all ranks, for a file that cannot be read and may be intact.
    """
    problem = None
    with raise_on_all_ranks(mesh, errors=(OSError,)):
        try:
            problem = _problem(folder, mesh)
        except (FileNotFoundError, NotADirectoryError) as error:
            problem = f"{Path(error.filename).relative_to(folder)} is missing"
    return first_reason(problem, mesh)


def _problem(folder: Path, mesh: Mesh) -> str | None:
    try:
        expected = json.loads((folder / DIGESTS).read_bytes())
        names = sorted(expected)[mesh.rank :: mesh.world_size]
    except ValueError:
        return f"{DIGESTS} is invalid"
    if not {STATE, f"{TENSORS}/.metadata"} <= set(expected):
        return f"{DIGESTS} is incomplete"
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: digest_file(folder / name), names))
    changed = [name for name, digest in zip(names, found) if digest != expected[name]]
    return f"the contents of {changed[0]} have changed" if changed else None


# --- tensors --------------------------------------------------------------------------------------


def load_tensors(folder: Path, targets: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Load the tensors of a checkpoint into ``targets``, which may be sharded in any way.

    Collective; without a mesh, this process loads alone. Parts that several ranks hold are read
    once and broadcast. Raises ValueError on every rank if any cannot load a tensor.
    """
    mesh = mesh or Mesh.single()
    names = sorted(targets)
    group = replica_group(targets.values(), mesh)
    readers = assign_ranks([targets[name] for name in names], group)
    group_rank = dist.get_rank(group) if group else 0
    with raise_on_all_ranks(mesh):
        check_shapes(folder, targets)
        read = {name: targets[name] for name, reader in zip(names, readers) if reader == group_rank}
        try:
            dcp.load(read, storage_reader=SafeReader(folder / TENSORS), no_dist=True)
        except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
            raise ValueError(f"checkpoint {folder} cannot be read: {error}") from error
    if group:
        for name, reader in zip(names, readers):
            dist.broadcast(local_shard(targets[name]), group=group, group_src=reader)


def check_shapes(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the checkpoint lacks a name or has another shape. Reads metadata only."""
    shapes = read_shapes(folder / TENSORS)
    for name, target in targets.items():
        if name not in shapes:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        shape, stored = tuple(target.shape), tuple(shapes[name].size)
        if shape != stored:
            raise ValueError(f"{name} has shape {shape}, but {stored} in checkpoint {folder}")
