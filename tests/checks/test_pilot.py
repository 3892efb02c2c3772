"""Comparison of a pilot's last iteration with the plan, and a pilot run on the CPU."""

import json
from pathlib import Path

import pytest
import torch

import post_train
from hyvideo.checks import pilot
from hyvideo.checks.pilot import SETTINGS, compare, print_pilot
from hyvideo.models.hunyuan_video15.sizes import Architecture
from hyvideo.planning.cost import duration
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config, parse

CONFIGS = Path(__file__).parents[2] / "configs"
RUN = PlannedRun(
    load_config(CONFIGS / "hunyuanvideo15_480p_8gpu_nft.yaml").as_pilot(), 8, Architecture()
)
ITERATION = duration(RUN).total
MEASURED = {
    **{f"time/{stage}": seconds for stage, seconds in duration(RUN).stages.items()},
    "time/conditions": 0.0,
    "time/record": 0.01 * ITERATION,
    "time/reward": 0.0,  # scoring overlaps with sampling
    "time/iteration": ITERATION,
    "memory/peak_gib": memory(RUN).peak() / GIB,
}


def deviating(changes, run=RUN):
    return [row.metric for row in compare(run, MEASURED | changes) if row.deviates]


@pytest.mark.parametrize("metric", [*SETTINGS, "time/iteration"])
def test_each_metric_far_above_its_plan_is_reported_alone(metric):
    value = (
        1.5 * MEASURED[metric] + 0.2 * ITERATION
        if metric.startswith("time")
        else 1.2 * MEASURED[metric]
    )
    assert deviating({metric: value}) == [metric]


def test_a_delay_below_a_twentieth_of_an_iteration_is_not_reported():
    planned = MEASURED["time/decode"]
    assert deviating({"time/decode": planned + 0.04 * ITERATION}) == []
    assert deviating({"time/decode": max(1.3 * planned, planned + 0.05 * ITERATION) + 0.1}) == [
        "time/decode"
    ]


def test_times_on_an_unknown_gpu_are_not_planned_but_memory_is():
    run = PlannedRun(RUN.config, 8, Architecture(), hardware=Hardware(rate=0.0))
    late = {name: 10 * value + 1 for name, value in MEASURED.items()}
    assert [row.metric for row in compare(run, late) if row.planned is not None] == [
        "memory/peak_gib"
    ]
    assert deviating(late, run) == ["memory/peak_gib"]


def test_what_deviates_is_printed_with_the_setting_to_look_at(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(pilot, "gpu_memory", lambda device: 80.0)

    def printed(changes):
        lines = [
            {"iteration": 1, "time/iteration": ITERATION + 270},
            {"iteration": 2, **MEASURED, **changes},
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print_pilot(RUN.with_settings(output_dir=str(tmp_path)), torch.device("cuda"))
        return capsys.readouterr().out

    planned = printed({})
    assert (
        "\nas planned\n" in planned
        and "iteration took 270 s longer" in planned
        and "x the plan" not in planned
    )
    late = printed({"time/decode": 4 * MEASURED["time/decode"], "time/record": ITERATION})
    assert (
        "4.0 x the plan; see vae_tile_size" in late
        and "not planned; see the disk of output_dir" in late
    )
    assert (
        "2 of 9 values deviate from the plan: time/decode, time/record." in late
        and "as planned" not in late
    )


@pytest.mark.slow
def test_a_pilot_on_the_cpu_runs_two_iterations_without_validation_in_its_own_folder(
    tmp_path, capsys
):
    words = [
        "--config",
        "configs/smoke.yaml",
        "--output_dir",
        str(tmp_path / "out"),
        "--report_to",
        "none",
        "--pilot",
    ]
    command = parse(words)
    assert (command.config.optimizer.max_steps, command.config.data.valid_video_csv) == (2, [])
    with post_train.ExitStack() as at_end:
        assert post_train.run(command, at_end) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["out-pilot"]
    assert not (tmp_path / "out-pilot" / "samples").exists()
    metric = next(line.split() for line in lines if line.startswith("  time/update"))
    assert float(metric[1]) > 0 and len(metric) == 2  # a CPU has no plan
    assert lines[-1].startswith("output: ") and "as planned" not in lines
