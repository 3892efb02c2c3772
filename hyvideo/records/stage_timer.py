"""Time of each stage of an iteration, and peak memory."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Measures the seconds of each stage as ``time/<stage>`` and calls ``on_stage`` at its start and end."""

    def __init__(self, device: torch.device, on_stage: Callable[..., None] = lambda *stage: None):
        self.device, self.on_stage = device, on_stage
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, stage: str, part: str = "") -> Iterator[None]:
        start = time.perf_counter()
        self.on_stage(stage, part)
        yield
        if self.device.type == "cuda":
            # Only this stream: rewards are computed concurrently on another one.
            torch.cuda.current_stream(self.device).synchronize()
        name = f"time/{stage}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.on_stage(f"after {stage}")

    def metrics(self) -> dict[str, float]:
        return self.seconds | {"time/iteration": time.perf_counter() - self._start}


def peak_memory_gib(device: torch.device, *, reserved: bool = False) -> float:
    """Return the peak memory so far in GiB: of the GPU, or of the process without one.

    ``reserved`` also counts the GPU memory that torch's allocator keeps for reuse.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved if reserved else torch.cuda.max_memory_allocated
        return peak(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
