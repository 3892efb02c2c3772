"""A pilot: times of its last iteration and peak memory, compared with the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from hyvideo.data.text import number
from hyvideo.planning.cost import duration
from hyvideo.planning.hardware import gpu_rates, hardware_of
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.records.metrics_file import read_metrics
from hyvideo.training.machine import device_name, gpu_memory

# Measured seconds and GiB up to these multiples of the plan count as planned.
_SLOWER = 1.3
_LARGER = 1.1
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
    """Return the times and the memory in ``metrics`` of an iteration beside the plan's,
    where it has them.
    """
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
        value = metrics.get(name, 0.0)
        plan = planned.get(name)
        if plan is None:
            deviates = False
        elif name.startswith("memory"):
            deviates = value > _LARGER * plan
        else:
            deviates = value > max(_SLOWER * plan, plan + delay)
        rows.append(Row(name, value, plan, deviates))
    return rows


def print_pilot(run: PlannedRun, device: torch.device) -> None:
    """Print the comparison of a finished pilot on ``device`` with its plan."""
    name = device_name(device)
    known = hardware_of(name) if gpu_rates(name)[1] else replace(run.hardware, rate=0.0)
    hardware = replace(known, gpu_memory=gpu_memory(device))
    run = replace(run.with_settings(device=device.type), hardware=hardware)
    first, second = read_metrics(Path(run.settings.output_dir) / "metrics.jsonl")
    warm_up = first["time/iteration"] - second["time/iteration"]
    print("\n".join(pilot_lines(run, name, compare(run, second), warm_up)))


def pilot_lines(run: PlannedRun, name: str, rows: list[Row], warm_up: float) -> list[str]:
    """Return the comparison on the device ``name``; the first iteration took ``warm_up`` seconds
    longer.
    """
    title = f"pilot: iteration 2 on {name}, compared with the plan"
    if not run.is_timed:
        title += " (there is a plan for released models on a GPU only)"
    elif not run.hardware.rate:
        title += " (this GPU is unknown: times are not planned)"
    lines = ["", title, f"  {'s or GiB':<18} {'measured':>10} {'planned':>10}"]
    lines += [_line(row) for row in rows]
    if warm_up > 0:
        lines.append(
            f"the first iteration took {number(warm_up)} s longer (compilation and warm-up)"
        )
    deviating = [row.metric for row in rows if row.deviates]
    if deviating:
        lines.append(
            f"{len(deviating)} of {len(rows)} values deviate from the plan: "
            f"{', '.join(deviating)}. docs/settings.md and docs/cost.md describe the settings."
        )
    elif any(row.planned is not None for row in rows):
        lines.append("as planned")
    lines.append(f"output: {run.settings.output_dir}; delete it after reading")
    return lines


def _line(row: Row) -> str:
    """Return a metric with both values and, if they deviate, the settings to look at."""
    planned = "" if row.planned is None else number(row.planned)
    line = f"  {row.metric:<18} {number(row.measured):>10} {planned:>10}"
    if not row.deviates:
        return line
    line += f"  {row.measured / row.planned:.1f} x the plan" if row.planned else "  not planned"
    return f"{line}; see {SETTINGS[row.metric]}" if row.metric in SETTINGS else line
