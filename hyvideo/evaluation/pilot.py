"""A pilot: times of its last iteration and peak memory, compared with the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from hyvideo.config.memory.cost import duration
from hyvideo.config.memory.hardware import gpu_rates, hardware_of
from hyvideo.config.memory.phases import GIB, memory
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.data.templates import fill
from hyvideo.records.metrics_file import read_metrics
from hyvideo.training.machine import device_name, gpu_memory

_SLOWER, _LARGER = 1.3, 1.1  # measured values up to these multiples of the plan count as planned
_NEGLIGIBLE = 0.05  # share of an iteration; shorter delays are not reported
SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())  # by metric


@dataclass(frozen=True)
class Row:
    """A metric of the pilot beside its plan."""

    metric: str
    measured: float
    planned: float | None  # None: cannot be predicted
    deviates: bool


def compare(run: PlannedRun, metrics: Mapping[str, float]) -> list[Row]:
    """Return the times and the memory in ``metrics`` of an iteration beside those of the plan, where it has them."""
    planned: dict[str, float] = {}
    if run.is_timed:
        planned["memory/peak_gib"] = memory(run).peak() / GIB
    if run.is_timed and run.hardware.rate:
        planned |= {name: 0.0 for name in ("time/conditions", "time/record")}
        planned |= {f"time/{stage}": seconds for stage, seconds in duration(run).stages.items()}
        planned["time/iteration"] = duration(run).total
    delay = _NEGLIGIBLE * planned.get("time/iteration", 0.0)
    rows = []
    for name in (*SETTINGS, "time/iteration"):
        value, limit = metrics.get(name, 0.0), planned.get(name)
        factor, slack = (_LARGER, 0.0) if name.startswith("memory") else (_SLOWER, delay)
        rows.append(Row(name, value, limit, limit is not None and value > max(factor * limit, limit + slack)))
    return rows


def print_pilot(run: PlannedRun, device: torch.device) -> None:
    """Print the comparison of a finished pilot on ``device`` with its plan."""
    name = device_name(device)
    known = hardware_of(name) if gpu_rates(name)[1] else replace(run.hardware, rate=0.0)
    hardware = replace(known, gpu_memory=gpu_memory(device))
    run = replace(run.with_settings(device=device.type), hardware=hardware)
    first, second = read_metrics(Path(run.settings.output_dir) / "metrics.jsonl")
    values = {"run": run, "name": name, "longer": first["time/iteration"] - second["time/iteration"]}
    print(fill(Path(__file__).with_name("pilot.txt.jinja"), rows=compare(run, second), settings=SETTINGS, **values))
