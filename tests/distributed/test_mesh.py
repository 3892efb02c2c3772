"""Tests of the process groups: their ranks and timeouts."""

from datetime import timedelta

import torch

from tests.distributed.launch import launch

CPU = torch.device("cpu")


def groups():
    """Return ranks and timeout in seconds of every process group of this rank."""
    from pathlib import Path

    import torch.distributed as dist

    from hyvideo.checkpoints.writer import CheckpointWriter
    from hyvideo.distributed import mesh as ranks

    mesh = ranks.start(2, CPU, dp_replicate=2, timeout=77)
    writer = CheckpointWriter(
        Path("unused"), mesh, keep=0, is_asynchronous=True, timeout=77, run="0f0f0f0f"
    )
    found = {
        "all": dist.group.WORLD,
        "video": mesh.sp_group,
        "replicate": mesh.shards.get_group("replicate"),
        "shard": mesh.shards.get_group("shard"),
        "checkpoint": writer._group,
    }
    return {
        name: [
            dist.get_process_group_ranks(group),
            group._get_backend(CPU).options._timeout / timedelta(seconds=1),
        ]
        for name, group in found.items()
    }


def test_every_group_has_its_ranks_and_the_requested_timeout():
    for rank, found in enumerate(launch("tests.distributed.test_mesh:groups", 4)):
        assert found == {
            "all": [[0, 1, 2, 3], 77],
            "video": [[0, 1] if rank < 2 else [2, 3], 77],
            "replicate": [[rank % 2, rank % 2 + 2], 77],
            "shard": [[0, 1] if rank < 2 else [2, 3], 77],
            "checkpoint": [[0, 1, 2, 3], 77],
        }
