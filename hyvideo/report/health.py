"""Is a run healthy? Its state, the time left, the metrics to look at first, and the GPUs of this
machine.
"""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hyvideo.data.run_folder import METRICS
from hyvideo.report.contents import Run
from hyvideo.report.series import SPIKE

SILENCE_S = 60.0  # without a heartbeat in .owner, a run has stopped (`distributed.ownership`)
STALL_FACTOR = 3.0  # an iteration that takes so many times as long as the recent ones is a warning
MIN_STALL_S = 60.0
NUM_RECENT = 20  # points of a curve that a check looks at


@dataclass(frozen=True)
class Status:
    """State of a run and the time left."""

    state: str  # "running", "finished" or "stopped"
    seconds_left: float | None  # of a running run, at the speed of its recent iterations
    silent_s: float | None  # seconds since the last iteration ended, if that is unusually long


@dataclass(frozen=True)
class Check:
    """One of the metrics to look at first."""

    title: str
    metric: str  # its name in the run; empty if the run does not have it
    latest: float | None
    healthy: str  # its healthy range, in words
    problem: str  # why the value needs attention; empty if it does not


def read_status(run: Run, now: float | None = None) -> Status:
    """Return the status of a run at a time, by default now."""
    now = time.time() if now is None else now
    left = run.config.optimizer.max_steps - run.last_iteration
    if not _is_owned(run.folder, now):
        return Status("finished" if left <= 0 else "stopped", None, None)
    each = run.series.seconds_each
    silent = now - _modified(run.folder / METRICS, now)
    is_stalled = each > 0 and left > 0 and silent > max(MIN_STALL_S, STALL_FACTOR * each)
    return Status("running", left * each if each else None, silent if is_stalled else None)


def status_text(run: Run, status: Status) -> str:
    """Return the status as a sentence without a period."""
    done = f"iteration {run.last_iteration} of {run.config.optimizer.max_steps}"
    if status.state == "finished":
        return f"finished, {run.last_iteration} iterations"
    if status.state == "stopped":
        return f"not running, {done}"
    if status.seconds_left is None:
        return f"running, {done}"
    return f"running, {done}, {_duration(status.seconds_left)} left"


def stall_text(run: Run, status: Status) -> str:
    """Return a warning if the current iteration takes unusually long, else ""."""
    if status.silent_s is None:
        return ""
    return (
        f"no iteration has ended for {_duration(status.silent_s)}; the recent ones took "
        f"{_duration(run.series.seconds_each)} each"
    )


def find_checks(run: Run) -> list[Check]:
    """Return the metrics to look at first; their names are searched in the run, since objectives
    have other metrics.
    """
    return [_check(run, *each) for each in _LOOK_FIRST]


def _check(
    run: Run, title: str, name: str, healthy: str, problem: Callable[[Run, list[float]], str]
) -> Check:
    metric = next((each for each in run.series.points if re.fullmatch(name, each)), "")
    values = [value for value in run.series.points.get(metric, []) if value is not None]
    return Check(
        title=title,
        metric=metric,
        latest=values[-1] if values else None,
        healthy=healthy,
        problem=problem(run, values) if values else "",
    )


def _no_problem(run: Run, values: list[float]) -> str:
    return ""


def _no_spread(run: Run, values: list[float]) -> str:
    return "" if values[-1] > 0 else "all rewards of a group are equal: no gradient"


def _off_policy(run: Run, values: list[float]) -> str:
    limit = max(1e-6, run.config.loss.clip_range)
    largest = max(values[-NUM_RECENT:])
    return "" if largest <= limit else f"above {limit:g}: rollouts and training disagree"


def _spikes(run: Run, values: list[float]) -> str:
    return "" if max(values[-NUM_RECENT:]) <= SPIKE else f"above {SPIKE:g} in a recent iteration"


def _below_base(run: Run, values: list[float]) -> str:
    base = (
        run.history[0].means.get("reward")
        if run.history and run.history[0].iteration == 0
        else None
    )
    return "below the base model" if base is not None and values[-1] < base else ""


def _hacking(run: Run, values: list[float]) -> str:
    return "reward hacking is suspected" if values[-1] > 0 else ""


_LOOK_FIRST = (
    ("Mean reward of the rollouts", "reward/mean", "rises over tens of iterations", _no_problem),
    (
        "Standard deviation within a group",
        "reward/std",
        "above 0; falls as the policy converges",
        _no_spread,
    ),
    (
        "Largest deviation of a ratio in the first update",
        r"\w+/ratio_first_deviation|\w+/first_deviation",
        "0 up to rounding",
        _off_policy,
    ),
    (
        "Gradient norm over its recent median",
        "grad/spike",
        "0.5 to 2; above 10 is a spike",
        _spikes,
    ),
    ("Validation reward", "validation/reward", "rises; the metric to judge a run by", _below_base),
    ("Reward hacking", "validation/hacking", "0", _hacking),
)


def _is_owned(folder: Path, now: float) -> bool:
    """Return whether a process that owns the folder is alive: its heartbeat is the time of
    a file.
    """
    return now - _modified(folder / ".owner", 0.0) < SILENCE_S


def _modified(path: Path, default: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return default


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# --- GPUs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuUse:
    """Use of a GPU at a time."""

    name: str
    memory_gib: float
    total_gib: float
    utilisation: float  # % of the last second in which a kernel ran
    watts: float | None


class GpuHistory:
    """Use of the GPUs of this machine over the last hour, read with pynvml if it is installed."""

    def __init__(self, size: int = 720, every_s: float = 5.0):
        self.every_s = every_s
        self.samples: deque[tuple[float, list[GpuUse]]] = deque(maxlen=size)
        self.problem = ""  # why there are no samples
        self._nvml = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ImportError:
            self.problem = (
                "pynvml is not installed; pip install nvidia-ml-py shows the use of the GPUs"
            )
        except pynvml.NVMLError as error:
            self.problem = f"this machine has no usable NVIDIA GPU: {error}"

    def sample(self) -> None:
        """Record the use of all GPUs now. Without pynvml, this has no effect."""
        if self._nvml is None:
            return
        try:
            uses = [self._use(number) for number in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError as error:
            self.problem = f"the GPUs cannot be read: {error}"
            return
        self.samples.append((time.time(), uses))

    def as_json(self) -> dict:
        """Return times, in minutes before the newest sample, and the use of each GPU."""
        if not self.samples:
            return {"problem": self.problem, "minutes": [], "gpus": []}
        newest = self.samples[-1][0]
        minutes = [round((at - newest) / 60, 2) for at, _ in self.samples]
        gpus = []
        for number in range(len(self.samples[-1][1])):
            uses = [asdict(each[number]) for _, each in self.samples]
            gpus.append(
                {
                    name: [use[name] for use in uses]
                    for name in ("memory_gib", "utilisation", "watts")
                }
            )
            gpus[-1]["name"] = uses[-1]["name"]
            gpus[-1]["total_gib"] = uses[-1]["total_gib"]
        return {"problem": "", "minutes": minutes, "gpus": gpus}

    def _use(self, number: int) -> GpuUse:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = nvml.nvmlDeviceGetName(handle)
        try:
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        except nvml.NVMLError:  # not all GPUs report it
            watts = None
        return GpuUse(
            name=name.decode() if isinstance(name, bytes) else name,
            memory_gib=round(memory.used / 2**30, 2),
            total_gib=round(memory.total / 2**30, 2),
            utilisation=float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            watts=watts,
        )
