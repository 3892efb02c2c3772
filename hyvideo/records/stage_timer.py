"""Time and TFLOP/s of each stage of an iteration, and peak memory."""

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Measures the stages of an iteration and calls ``on_stage`` at their start and end.

    On a GPU, events in the current stream mark the stages, so that the CPU does not wait at the end
    of a stage, and torch's peak memory is that since the last mark.
    """

    def __init__(
        self,
        device: torch.device,
        on_stage: Callable[..., None] = lambda *stage: None,
        *,
        # returns the FLOPs that the stages have computed so far
        flops: Callable[[], float] = lambda: 0.0,
        peak: float = 0.0,  # TFLOP/s of the device; 0: unknown
    ):
        self.on_stage = on_stage
        self._flops = flops
        self._peak = peak
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._memory: dict[str, float] = {}  # peak bytes by metric
        self._stages: list[tuple] = []  # name, mark of the start, mark of the end, FLOPs
        self._synchronize()  # the first event and the CPU's clock have the same origin
        self.start = time.perf_counter()
        self._cpu_start = time.process_time()
        if self._stream:  # what was allocated before, such as a trial of the decoding, is not of it
            torch.cuda.reset_peak_memory_stats(device)
        self._origin = self._mark()

    @contextmanager
    def __call__(self, stage: str, part: str = "") -> Iterator[None]:
        start = self._mark()
        self._note_memory()
        flops = self._flops()
        self.on_stage(stage, part)
        yield
        self._stages.append((stage, start, self._mark(), self._flops() - flops))
        self._note_memory(stage)
        self.on_stage(f"after {stage}")

    def spans(self) -> list[tuple[str, tuple[float, float]]]:
        """Return each finished stage with its start and end on the clock of `time.perf_counter`.

        Waits for the GPU.
        """
        self._synchronize()
        return [
            (stage, (self._seconds(start), self._seconds(end)))
            for stage, start, end, _ in self._stages
        ]

    def metrics(self) -> dict[str, float]:
        """Return ``time/<stage>``, ``time/cpu``, ``perf/tflops/<stage>`` of stages with FLOPs, and
        ``perf/mfu/<stage>``.
        """
        seconds = Counter()
        flops = Counter()
        for (stage, (start, end)), (*_, count) in zip(self.spans(), self._stages):
            seconds[stage] += end - start
            flops[stage] += count
        seconds["iteration"] = time.perf_counter() - self.start
        flops["iteration"] = flops.total()
        metrics = {f"time/{stage}": value for stage, value in seconds.items()}
        # of all threads, so that the load of the machine does not count
        metrics["time/cpu"] = time.process_time() - self._cpu_start
        for stage in (stage for stage in flops if flops[stage] and seconds[stage]):
            rate = metrics[f"perf/tflops/{stage}"] = flops[stage] / seconds[stage] / 1e12
            if self._peak:
                metrics[f"perf/mfu/{stage}"] = rate / self._peak
        return metrics

    def memory(self) -> dict[str, float]:
        """Return the peak memory in GiB since the start, and on a GPU ``memory/<stage>_gib``."""
        if not self._stream:
            peak = peak_memory_gib(self._device)
            return {"memory/peak_gib": peak, "memory/peak_reserved_gib": peak}
        self._note_memory()
        return {f"memory/{name}_gib": size / 2**30 for name, size in self._memory.items()}

    def _note_memory(self, stage: str = "peak") -> None:
        """Record the peak memory of a GPU since the last call for the stage and for the whole."""
        if not self._stream:
            return
        allocated = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for name, size in ((stage, allocated), ("peak", allocated), ("peak_reserved", reserved)):
            self._memory[name] = max(size, self._memory.get(name, 0.0))

    def _synchronize(self) -> None:
        if self._stream:  # only this stream: rewards are computed concurrently on another one
            self._stream.synchronize()

    def _mark(self) -> "float | torch.cuda.Event":
        if self._stream:
            return self._stream.record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def _seconds(self, mark: "float | torch.cuda.Event") -> float:
        return self.start + self._origin.elapsed_time(mark) / 1000 if self._stream else mark


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far in GiB: of the GPU, or of the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
