"""World size, sp_size and dp_replicate to places: which rank holds which rollouts, and who talks to whom.

    rank 0  1   2  3   4  5   6  7      8 GPUs, sp_size 2, dp_replicate 2
         [0  1] [2  3] [4  5] [6  7]     a replica: shares the tokens of its videos
         [0  1   2  3] [4  5   6  7]     shards parameters (a node, say); gradients are averaged between them

Without dp_replicate parameters are sharded over all ranks.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyvideo.config.processes import rank, world_size


@dataclass(frozen=True)
class Mesh:
    """Place of this process. Neighbouring ranks share a video by sequence parallelism; the rest is data parallel."""

    rank: int
    world_size: int
    sp_size: int
    sp_group: "dist.ProcessGroup | None" = field(default=None, compare=False)
    shards: DeviceMesh | None = field(default=None, compare=False)  # (ranks,) or (replicas of the model, ranks of one)

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.sp_size

    @property
    def replica(self) -> int:
        return self.rank // self.sp_size

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def own_share(self, rows: list[int]) -> list[int]:
        """Which of a replica's rows this rank decodes and scores."""
        return rows[self.sp_rank :: self.sp_size]


def start(sp_size: int, device: torch.device, *, dp_replicate: int = 1, timeout: float = 1800.0) -> Mesh:
    """Joins the process group, if torchrun started several processes, and gives this one's place.

    Args:
        timeout: Seconds after which a collective that some rank does not join ends the run.
    """
    num_processes = world_size()
    # hyvideo.config.rules.layout_problems says this to the user, before anything is loaded.
    assert num_processes % (dp_replicate * sp_size) == 0, (num_processes, dp_replicate, sp_size)
    join(device, timeout=timeout)
    if num_processes == 1:
        return Mesh(0, 1, 1)
    numbers = torch.arange(num_processes)
    group = _own_group(numbers.view(-1, sp_size), timeout) if sp_size > 1 else None
    if dp_replicate > 1:
        places = numbers.view(dp_replicate, -1)
        groups = [_own_group(places.T, timeout), _own_group(places, timeout)]
        shards = DeviceMesh.from_group(groups, device.type, mesh=places, mesh_dim_names=("replicate", "shard"))
    else:
        shards = init_device_mesh(device.type, (num_processes,), mesh_dim_names=("shard",))
    return Mesh(rank(), num_processes, sp_size, group, shards)


def join(device: torch.device, *, timeout: float) -> None:
    """Joins the process group, once, if torchrun started several processes; ``timeout`` as of `start`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size() > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def _own_group(rows: torch.Tensor, timeout: float) -> dist.ProcessGroup:
    """A group of each row of ranks; gives this rank's. A mesh's own groups would have torch's timeout, not ours."""
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=timeout))
    return own


def stop() -> None:
    """Leaves the process group. The barrier keeps a fast rank from tearing down what a slow one still uses."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
