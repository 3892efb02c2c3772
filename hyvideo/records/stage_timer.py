"""Seconds of the stages of an iteration, and the memory that they take."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Seconds in each stage of an iteration, as ``time/<stage>``; tells ``on_stage`` where each begins and ends."""

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
            # This stream, not the device: rewards are computed beside it.
            torch.cuda.current_stream(self.device).synchronize()
        name = f"time/{stage}"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.on_stage(f"after {stage}")

    def metrics(self) -> dict[str, float]:
        return self.seconds | {"time/iteration": time.perf_counter() - self._start}


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else of the process. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
