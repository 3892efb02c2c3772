"""Process groups of a run, from world size, sp_size and dp_replicate.

    rank 0  1   2  3   4  5   6  7      8 GPUs, sp_size 2, dp_replicate 2
         [0  1] [2  3] [4  5] [6  7]     replicas: each splits the tokens of its videos over its ranks
         [0  1   2  3] [4  5   6  7]     model replicas (nodes): parameters sharded within, gradients averaged across

Without dp_replicate, parameters are sharded over all ranks.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Timeout in seconds where ranks share videos unevenly: a rank with fewer waits for the others until
# the end. It can be long, because torchrun ends all ranks as soon as one fails.
UNEVEN_WORK_TIMEOUT = 86400.0


@dataclass(frozen=True)
class Mesh:
    """Rank and process groups of this process.

    Consecutive ranks form a sequence-parallel replica.
    """

    rank: int
    world_size: int
    sp_size: int
    sp_group: "dist.ProcessGroup | None" = field(default=None, compare=False)
    # (ranks,) or (model replicas, ranks of each)
    shards: DeviceMesh | None = field(default=None, compare=False)

    @staticmethod
    def single() -> "Mesh":
        """Return the mesh of a process without others."""
        return Mesh(rank=0, world_size=1, sp_size=1)

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.sp_size

    @property
    def replica(self) -> int:
        return self.rank // self.sp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def rank_share(self, rows: list[int]) -> list[int]:
        """Return the rows of a replica that this rank decodes and scores."""
        return rows[self.rank % self.sp_size :: self.sp_size]


def start(
    sp_size: int, device: torch.device, *, dp_replicate: int = 1, timeout: float = 1800.0
) -> Mesh:
    """Join torchrun's process group and return the mesh.

    Collectives fail after ``timeout`` seconds.
    """
    join(device, timeout=timeout)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    assert world_size % (sp_size * dp_replicate) == 0, (
        f"sizes do not divide: {world_size}, {sp_size}, {dp_replicate}"
    )
    if world_size == 1:
        return Mesh.single()
    numbers = torch.arange(world_size)
    group = _new_group(numbers.view(-1, sp_size), timeout) if sp_size > 1 else None
    if dp_replicate > 1:
        grid = numbers.view(dp_replicate, -1)  # (model replicas, ranks of each)
        groups = [_new_group(grid.T, timeout), _new_group(grid, timeout)]
        shards = DeviceMesh.from_group(
            groups, device.type, mesh=grid, mesh_dim_names=("replicate", "shard")
        )
    else:
        shards = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if device.type == "cuda":
        # connects the GPUs, so that a wrong network is reported before weights are loaded
        dist.all_reduce(torch.zeros(1, device=device))
    return Mesh(dist.get_rank(), world_size, sp_size, group, shards)


def join(device: torch.device, *, timeout: float) -> None:
    """Join the process group if torchrun started several processes and it is not joined;
    ``timeout`` as in `start`.

    Only CPUs are connected: NCCL, which hangs if one rank has no GPU, starts with the first
    collective on a GPU. Raises ValueError if rank 0's machine has no address.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
        check_master_address()
        with _default_signals():  # while it waits for the other ranks
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def check_master_address() -> None:
    """Raise ValueError if MASTER_ADDR, the machine of rank 0, is a URL or has no address; torch
    would ask for it for half an hour.
    """
    name = os.environ.get("MASTER_ADDR", "")
    problem = "it is a URL" if "/" in name else ""
    try:
        if name and not problem:
            socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        # a name server that does not answer may answer later
        if not isinstance(error, socket.gaierror) or error.errno != socket.EAI_AGAIN:
            problem = str(error)
    if problem:
        raise ValueError(
            "MASTER_ADDR must be the name or the IP address of the machine of rank 0, without "
            f"http:// and port, got {name!r}: {problem}"
        )


@contextmanager
def _default_signals() -> Iterator[None]:
    """Context manager in which a signal that is not ignored ends the process at once: Python's
    handlers do not run while the process waits inside of torch.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _new_group(rows: torch.Tensor, timeout: float) -> dist.ProcessGroup:
    """Create a group for each row and return this rank's.

    Groups created by DeviceMesh would have torch's timeout.
    """
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=timeout))
    return group


def stop() -> None:
    """Leave the process group, after a barrier, because other ranks may still use connections to
    this one.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
