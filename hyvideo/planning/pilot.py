"""A pilot: times of its last iteration and peak memory, compared with the plan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from hyvideo.files.text import number
from hyvideo.models.offload import total_bytes
from hyvideo.planning.hardware import hardware_of_device
from hyvideo.planning.hours import iteration_seconds, stage_seconds
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.records.metrics_file import read_metrics

_STAGES = "conditions", "rollout", "decode", "reward", "anchor", "record", "update", "iteration"


def print_pilot(run: PlannedRun, device: torch.device) -> None:
    """Print the comparison of a finished pilot on ``device`` with its plan."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the CPU"
    hardware = hardware_of_device(name, total_bytes(device) / GIB)
    run = replace(run.with_settings(device=device.type), hardware=hardware)
    first, second = read_metrics(Path(run.settings.output_dir) / "metrics.jsonl")
    warm_up = first["time/iteration"] - second["time/iteration"]
    lines = ["", f"pilot: iteration 2 on {name}, compared with the plan"]
    lines += comparison(planned_metrics(run), second)
    if warm_up > 0:
        lines.append(
            f"the first iteration took {number(warm_up)} s longer (compilation and warm-up)"
        )
    lines.append(f"output: {run.settings.output_dir}; delete it after reading")
    print("\n".join(lines))


def planned_metrics(run: PlannedRun) -> dict[str, float]:
    """Return the planned times and memory under the names of the metrics; without those that cannot
    be planned.
    """
    planned = {}
    if run.config.model.device != "cpu":
        planned["memory/peak_gib"] = memory(run).peak() / GIB
    if run.is_timed:
        planned |= {f"time/{stage}": seconds for stage, seconds in stage_seconds(run).items()}
        planned["time/iteration"] = iteration_seconds(run)
    return planned


def comparison(planned: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """Return a table of the measured and planned numbers of an iteration; "-" where there is
    no plan.
    """
    lines = [f"  {'s or GiB':<18} {'measured':>10} {'planned':>10}"]
    for name in (*(f"time/{stage}" for stage in _STAGES), "memory/peak_gib"):
        predicted = number(planned[name]) if name in planned else "-"
        lines.append(f"  {name:<18} {number(measured.get(name, 0.0)):>10} {predicted:>10}")
    return lines
