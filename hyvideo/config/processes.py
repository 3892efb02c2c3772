"""How many processes torchrun started and which of them this is, read without torch."""

import os
import time


def world_size() -> int:
    """Number of processes that torchrun started, 1 without it. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process among all, 0 without torchrun. Needs no process group."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def wait_for_turn() -> None:
    """Waits, but on the first rank, as torchrun ends the others when it has left: what all have to say is said once."""
    time.sleep(2.0 * ((rank() > 0) + (local_rank() > 0)))
