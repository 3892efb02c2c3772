"""Number of processes and rank of this one, as set by torchrun. Imports no torch."""

import os
import time


def world_size() -> int:
    """Return the number of processes started by torchrun, 1 without it. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def use_expandable_segments() -> None:
    """Let torch's GPU allocator extend its segments, which avoids fragmentation. Call before torch is imported.

    PYTORCH_ALLOC_CONF of the user takes precedence, or PYTORCH_CUDA_ALLOC_CONF, which torch reads first.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def wait_for_rank_0() -> None:
    """Delay all ranks except rank 0, so that a common error prints once: torchrun ends them when rank 0 exits."""
    time.sleep(2.0 * ((rank() > 0) + (local_rank() > 0)))
