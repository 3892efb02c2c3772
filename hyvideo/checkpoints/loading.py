"""Loading of the tensors of a checkpoint, and the search for corrupted files, by any number of
ranks.

`reader`, and with it torch.distributed.checkpoint, is imported where tensors are read: this takes a
second of CPU time, which a base model or a new run does not need.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from hyvideo.checkpoints.format import TENSORS, corruption_of
from hyvideo.distributed.collectives import first_reason, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import assign_ranks, local_shard, replica_group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def corruption(folder: Path, mesh: Mesh) -> str | None:
    """Return why the files of a checkpoint differ from what was written; None if they do not.

    Reads all bytes, divided among the ranks, which must see the same folder. Collective. Raises
    OSError, on all ranks, for a file that cannot be read and may be intact.
    """
    problem = None
    with raise_on_all_ranks(mesh, errors=(OSError,)):
        problem = corruption_of(folder, rank=mesh.rank, num_ranks=mesh.world_size)
    return first_reason(problem, mesh)


def load_tensors(folder: Path, targets: dict[str, Tensor], mesh: Mesh | None = None) -> None:
    """Load the tensors of a checkpoint into ``targets``, which may be sharded in any way.

    Collective; without a mesh, this process loads alone. Parts that several ranks hold are read
    once and broadcast. Raises ValueError on every rank if any cannot load a tensor.
    """
    import torch.distributed.checkpoint as dcp

    from hyvideo.checkpoints.reader import SafeReader

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


def stored_shapes(folder: Path) -> "dict[str, TensorStorageMetadata]":
    """Return the metadata of each tensor of a checkpoint by name, as `read_shapes` does."""
    from hyvideo.checkpoints.reader import read_shapes

    return read_shapes(folder / TENSORS)


def check_shapes(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the checkpoint lacks a name or has another shape. Reads metadata only."""
    shapes = stored_shapes(folder)
    for name, target in targets.items():
        if name not in shapes:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        shape, stored = tuple(target.shape), tuple(shapes[name].size)
        if shape != stored:
            raise ValueError(f"{name} has shape {shape}, but {stored} in checkpoint {folder}")
