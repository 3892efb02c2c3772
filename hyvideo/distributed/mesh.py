"""World size and sp_size to replicas: which rank holds which rollouts."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """Place of this process. Neighbouring ranks share a video by sequence parallelism; the rest is data parallel."""

    rank: int
    world_size: int
    sp_size: int

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.sp_size

    @property
    def replica(self) -> int:
        return self.rank // self.sp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size() -> int:
    """Number of processes that torchrun started, 1 without it. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process among all, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def start(sp_size: int, device: torch.device) -> Mesh:
    """Joins the process group, if torchrun started several processes, and gives this one's place."""
    num_processes = world_size()
    if num_processes % sp_size:
        raise ValueError(f"the number of processes must be a multiple of sp_size, got {num_processes} and {sp_size}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if num_processes > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Mesh(rank(), num_processes, sp_size)


def stop() -> None:
    """Leaves the process group. The barrier keeps a fast rank from tearing down what a slow one still uses."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
