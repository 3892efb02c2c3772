"""Comparison of a pilot's last iteration with the plan, and a pilot run on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

import post_train
from hyvideo.models.sizes import released_sizes
from hyvideo.planning.hardware import hardware_of_device
from hyvideo.planning.pilot import comparison, planned_metrics
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.command_line import load_config, parse

CONFIGS = Path(__file__).parents[2] / "configs"
RUN = PlannedRun(
    load_config(CONFIGS / "hunyuanvideo15_480p_8gpu_nft.yaml").as_pilot(),
    8,
    released_sizes("480p_t2v"),
)


def test_a_pilot_shows_the_measured_and_the_planned_numbers():
    planned = planned_metrics(RUN)
    stages = ("rollout", "anchor", "update", "decode", "reward", "iteration")
    assert planned.keys() == {*(f"time/{stage}" for stage in stages), "memory/peak_gib"}
    planned = {"time/rollout": 30.0, "memory/peak_gib": 70.0}
    rows = comparison(planned, {"time/rollout": 40.0, "time/update": 7.0, "memory/peak_gib": 75.0})
    cells = {row.split()[0]: row.split()[1:] for row in rows[1:]}
    assert cells["time/rollout"] == ["40", "30"] and cells["memory/peak_gib"] == ["75", "70"]
    assert cells["time/update"] == ["7", "-"]


def test_on_an_unknown_gpu_only_the_memory_is_planned():
    unknown = replace(RUN, hardware=hardware_of_device("NVIDIA H20", 90.0))
    assert planned_metrics(unknown).keys() == {"memory/peak_gib"}
    assert planned_metrics(RUN.with_settings(device="cpu")) == {}


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
    assert float(metric[1]) > 0 and metric[2] == "-"  # a CPU has no plan
    assert lines[-1].startswith("output: ")
