"""Number and rank of this process as set by torchrun, read without torch."""

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


def wait_for_turn() -> None:
    """Wait on all ranks but the first: when rank 0 exits, torchrun ends the others, so a common message prints once."""
    time.sleep(2.0 * ((rank() > 0) + (local_rank() > 0)))
