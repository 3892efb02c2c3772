"""Times, FLOPs and the timeline of stages, on a CPU and with events of a stream."""

import json
from types import SimpleNamespace

import pytest
import torch

from hyvideo.planning.hardware import hardware_of_device
from hyvideo.records import stage_timer, timeline
from hyvideo.records.stage_timer import StageTimer
from hyvideo.records.timeline import write_timeline


class Clock:
    """Seconds that pass on the CPU and in the stream; the stream runs behind and marks events when
    it gets there.
    """

    def __init__(self, monkeypatch):
        self.cpu, self.stream, self.waits = 0.0, 0.0, 0
        self.busy = 100.0  # CPU seconds of the process, since it began
        clocks = SimpleNamespace(perf_counter=lambda: self.cpu, process_time=lambda: self.busy)
        monkeypatch.setattr(stage_timer, "time", clocks)
        monkeypatch.setattr(timeline, "time", clocks)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace())
        self.allocated = self.peak = 0.0
        for name in ("max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget_peak)

    def forget_peak(self, device):
        self.peak = self.allocated

    def allocate(self, peak, *, kept=0.0):
        """Use ``peak`` GiB more than is allocated, of which ``kept`` stay allocated."""
        self.peak = max(self.peak, self.allocated + peak * 2**30)
        self.allocated += kept * 2**30

    def submit(self, *, cpu, stream):
        self.cpu += cpu
        self.busy += cpu / 2  # the machine is shared
        self.stream = max(self.stream, self.cpu) + stream

    def record_event(self, event):
        at = max(self.cpu, self.stream)
        event.elapsed_time = lambda other: 1000 * (other.at - at)
        event.at = at
        return event

    def synchronize(self):
        self.waits += 1
        self.cpu = max(self.cpu, self.stream)


def measure(clock, device):
    """An iteration whose update takes 1 s on the CPU and 4 s more in the stream, then 2 s of work
    on the CPU alone.
    """
    done = [0.0]
    timer = StageTimer(torch.device(device), flops=lambda: done[0], peak=10.0)
    with timer("update"):
        clock.submit(cpu=1.0, stream=4.0)
        done[0] += 12e12
    with timer("record"):
        clock.submit(cpu=2.0, stream=0.0)
    return timer


def test_events_measure_the_stream_and_no_stage_waits_for_it(monkeypatch):
    clock = Clock(monkeypatch)
    timer = measure(clock, "cuda")
    assert clock.waits == 1 and clock.cpu == 3.0  # at the start only
    assert timer.spans() == [("update", (0.0, 5.0)), ("record", (5.0, 5.0))] and clock.waits == 2
    rates = {
        "perf/tflops/update": 2.4,
        "perf/mfu/update": 0.24,
        "perf/tflops/iteration": 2.4,
        "perf/mfu/iteration": 0.24,
    }
    assert timer.metrics() == pytest.approx(
        {"time/update": 5.0, "time/record": 0.0, "time/iteration": 5.0, "time/cpu": 1.5} | rates
    )


def test_a_cpu_is_measured_by_its_clock(monkeypatch):
    timer = measure(Clock(monkeypatch), "cpu")
    assert timer.spans() == [("update", (0.0, 1.0)), ("record", (1.0, 3.0))]
    assert timer.metrics()["perf/tflops/iteration"] == pytest.approx(4.0)


def test_the_timeline_has_what_runs_during_the_iteration(monkeypatch, tmp_path):
    Clock(monkeypatch).cpu = 13.0
    spans = [
        ("update", (10.0, 12.0)),
        ("scoring", (8.0, 9.0)),
        ("writing", (9.5, 11.0)),
        ("writing", (12.0,)),
    ]
    write_timeline(tmp_path, 3, 10.0, spans)
    shown = [["update", 0.0, 2.0], ["writing", 0.0, 1.0], ["writing", 2.0, 3.0]]
    assert json.loads((tmp_path / "timeline.json").read_text()) == {"iteration": 3, "spans": shown}


@pytest.mark.parametrize(
    "name, peak",
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0)],
)
def test_peaks_are_those_of_whole_known_gpus(name, peak):
    assert hardware_of_device(name, 80.0).peak == peak


def test_each_stage_has_its_own_peak_and_the_trials_before_an_iteration_do_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    clock.allocate(22.0, kept=1.0)  # the trial of the decoding, whose kernels are measured
    timer = StageTimer(torch.device("cuda"))
    with timer("rollout"):
        clock.allocate(4.0, kept=2.0)
    clock.allocate(6.0)  # between stages
    for peak in (3.0, 1.0):
        with timer("update"):
            clock.allocate(peak)
    expected = {"rollout": 5.0, "update": 6.0, "peak": 9.0, "peak_reserved": 9.0}
    assert timer.memory() == {f"memory/{name}_gib": size for name, size in expected.items()}
    with timer("validation"):
        clock.allocate(9.0)
    assert timer.memory()["memory/validation_gib"] == timer.memory()["memory/peak_gib"] == 12.0
    assert StageTimer(torch.device("cuda")).memory()["memory/peak_gib"] == 3.0


def test_the_memory_of_a_cpu_run_is_that_of_its_process():
    memory = StageTimer(torch.device("cpu")).memory()
    assert memory.keys() == {"memory/peak_gib", "memory/peak_reserved_gib"}
    assert min(memory.values()) > 0.1
