"""Memory of a GPU that a process may use: all of it or, to try a smaller GPU, the part in
GPU_MEMORY_LIMIT_GIB.
"""

import math
import os

import torch

from hyvideo.data.text import quote

LIMIT = "GPU_MEMORY_LIMIT_GIB"  # environment variable
_CONTEXT = 2**30  # bytes that the driver's context needs at most, outside torch's allocator


def limit_bytes() -> float:
    """Return the limit of the environment in bytes, infinity without one.

    Raises ValueError if it is no number.
    """
    text = os.environ.get(LIMIT, "")
    if not text:
        return math.inf
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(
            f"the environment variable {LIMIT} must be a positive number of GiB, got "
            f"{quote(text)}; correct it, or unset it to use the whole GPU"
        )
    return limit * 2**30


def total_bytes(device: torch.device) -> float:
    """Return the memory of a GPU, at most the limit; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return min(torch.cuda.get_device_properties(device).total_memory, limit_bytes())


def free_bytes(device: torch.device) -> float:
    """Return the bytes that torch can still allocate on a GPU, its cache included; infinity on a
    CPU.
    """
    if device.type != "cuda":
        return math.inf
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    limit = limit_bytes()
    if limit < total:
        free = min(free, limit - _context_bytes(free, total, reserved) - reserved)
    return free + reserved - torch.cuda.memory_allocated(device)


def apply_limit(device: torch.device) -> None:
    """Let torch allocate at most the limit, minus what the driver's context takes of it.

    Call before loading models.
    """
    if device.type != "cuda":
        return
    limit = limit_bytes()
    if math.isinf(limit):
        return
    free, total = torch.cuda.mem_get_info(device)
    if limit < total:
        context = _context_bytes(free, total, torch.cuda.memory_reserved(device))
        torch.cuda.set_per_process_memory_fraction((limit - context) / total, device)


def _context_bytes(free: int, total: int, reserved: int) -> int:
    """Return the bytes in use outside torch's allocator, at most `_CONTEXT`: the rest is of other
    processes.
    """
    return min(max(total - free - reserved, 0), _CONTEXT)
