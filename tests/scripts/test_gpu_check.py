"""gpu_check with tiny models on the CPU, so that every lane has run before it runs on a GPU."""

import ast
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning.flops import count_parameters
from hyvideo.planning.hardware import (
    MEASURED,
    assumed_hardware,
    hardware_of,
    hardware_of_device,
)
from scripts import gpu_check
from scripts.gpu_check import NUMBERS, PARTS, SEVERAL, main
from tests import forked
from tests.conftest import ROOT
from tests.cuda import full_width
from tests.cuda.lanes import Lane, fits, run_lanes


@pytest.mark.slow
def test_every_lane_passes_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = ["--output_dir", str(tmp_path / "out")]
    code = main(["all", "weights", "--tiny", "--device", "cpu", *folders])
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    failed = [result for result in results if not result["ok"]]
    assert not failed and code == 0
    assert {result["lane"] for result in results} == {
        name for part in PARTS.values() for name in part
    }
    rows = {row["what"]: row for result in results for row in result["rows"]}
    assert len(rows["test_speed.py::test_profile"].keys() - {"what", "ok", "seconds"}) == 20
    for how in ("eager", "compiled"):
        assert rows[f"test_ratios.py::test_log_ratios[{how}-default]"]["grad"] == 0
    for name in ("test_runs.py::test_resume", "test_gradient.py::test_repeats"):
        assert rows[name]["deterministic"] and rows[name]["bit for bit"]
    pilots = [row for name, row in rows.items() if "test_pilot[" in name]
    assert len(pilots) == 5
    assert all(row["iteration 1, s"] > 0 and row["time/update"] > 0 for row in pilots)
    # the summary names values that the tests record; some, only on a GPU
    missing = {number.value for number in NUMBERS if not number.values(results)}
    assert missing <= {"TFLOP/s", "TFLOP/s backward", "TB/s of copies", "GB/s from pinned memory"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"gpu.json", "gpu.md", "gpu.log"}


@pytest.mark.system
def test_two_lanes_pass_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = ["--output_dir", str(tmp_path / "out")]
    chosen = ["speed", "profile"]
    code = main(["quick", "more", "--only", *chosen, "--tiny", "--device", "cpu", *folders])
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert code == 0
    assert [(result["lane"], result["ok"]) for result in results] == [
        (name, True) for name in chosen
    ]
    rows = {row["what"]: row for result in results for row in result["rows"]}
    assert rows["test_speed.py::test_training[compiled]"]["s"] > 0


def test_every_test_of_a_gpu_is_in_one_lane():
    """A person with a GPU for a quarter of an hour types `gpu_check`, not pytest."""
    lanes = [
        test.partition("[")[0]
        for part in PARTS.values()
        for lane in part.values()
        for test in lane.tests
    ]
    for file in (ROOT / "tests" / "cuda").glob("test_*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                assert f"{file.name}::{function.name}" in lanes or file.name in lanes


def test_a_part_ends_within_five_minutes_and_quick_is_two_of_them():
    assert SEVERAL["quick"] == ["correct", "speed"]
    for part in SEVERAL["all"]:
        lanes = PARTS[part].values()
        beside = [lane for lane in lanes if lane.gib]
        alone = [lane for lane in lanes if not lane.gib]
        assert sum(lane.gib for lane in beside) <= 139
        seconds = sum(lane.seconds for lane in alone) + max(
            (lane.seconds for lane in beside), default=0
        )
        assert seconds <= 300


def test_lanes_start_beside_others_if_they_fit(monkeypatch):
    monkeypatch.setattr("tests.cuda.lanes.num_cores", lambda: 3)
    small, large, alone = (Lane([], 1, 1, gib) for gib in (20.0, 50.0, None))
    assert fits(large, [], 24)  # nothing else runs; the GPU may be smaller than estimated
    assert fits(small, [large], 70) and not fits(small, [large], 69)
    assert fits(alone, [], 80)
    assert not fits(alone, [small], 80) and not fits(small, [alone], 80)
    assert not fits(small, [small] * 3, 80)  # a core for each


def test_two_lanes_run_at_the_same_time(tmp_path):
    """Each lane waits for the other one."""
    for ours, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"test_{ours}.py").write_text(
            "import pathlib, time\n"
            "def test_both():\n"
            f"    pathlib.Path({str(tmp_path / ours)!r}).touch()\n"
            "    end = time.monotonic() + 60\n"
            f"    while not pathlib.Path({str(tmp_path / other)!r}).exists():\n"
            "        assert time.monotonic() < end\n"
            "        time.sleep(0.05)\n"
        )
    lanes = {
        name: Lane([os.path.relpath(tmp_path / f"test_{name}.py", ROOT / "tests/cuda")], 1, 90, 1)
        for name in "ab"
    }
    (tmp_path / "out").mkdir()
    results = run_lanes(
        lanes,
        tmp_path / "out",
        tmp_path,
        room=2,
        slowness=1,
        title="two lanes",
        numbers=[],
        python=sys.executable,
        environment={},
        on_row=print,
    )
    assert [result["reason"] for result in results] == [None, None]


@pytest.mark.system
def test_sigterm_ends_the_lanes_and_keeps_what_was_measured(tmp_path):
    """A machine that is lent for ten minutes ends the command with SIGTERM."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "scripts.gpu_check", "quick", "--tiny", "--device", "cpu"]
    command += ["--only", "kernels", "speed", "--output_dir", str(out)]
    without = {name: value for name, value in os.environ.items() if name != forked.OWNER}
    with subprocess.Popen(
        command, cwd=ROOT, env=without, stdout=subprocess.PIPE, text=True
    ) as check:
        first = check.stdout.readline()
        lanes = psutil.Process(check.pid).children(recursive=True)
        check.send_signal(signal.SIGTERM)
        check.communicate(timeout=60)
    assert first.startswith("kernels: ") and check.returncode == 128 + signal.SIGTERM
    (kernels,) = json.loads((out / "gpu.json").read_text())
    assert (kernels["ok"], kernels["reason"]) == (False, "stopped")
    assert kernels["rows"][0]["ok"] and "stopped" in (out / "gpu.md").read_text()
    assert "lane kernels" in (out / "gpu.log").read_text()
    assert len(lanes) > 1 and psutil.wait_procs(lanes, timeout=30)[1] == []


@pytest.mark.parametrize(
    "version, size",
    [("wan2.1_t2v_1.3b", (81, 480, 832)), ("wan2.2_t2v_a14b_4step", (33, 240, 416))],
)
def test_the_checkpoints_of_the_pilots_have_the_released_sizes(tmp_path, version, size):
    full_width.write(tmp_path / "checkpoints", version, ["a cat"], is_tiny=False)
    released = released_sizes(version)
    written = read_architecture(tmp_path / "checkpoints", version)
    assert count_parameters(written) == count_parameters(released)
    assert written.image_tokens(*size) == released.image_tokens(*size)
    assert check_checkpoint(tmp_path / "checkpoints", version, [], weights_needed=False) == []


BLOCKED = """
import sys
for name in ("av", "uvicorn", "fastapi", "starlette"):
    sys.modules[name] = None
"""


@pytest.mark.system
def test_the_checks_run_without_the_packages_of_files_and_servers(tmp_path):
    """A machine for checks lacks av, uvicorn and fastapi, and the others lie in a folder of
    PYTHONPATH.
    """
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    folders = ["--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "scripts.gpu_check", "quick", "--tiny"]
    command += ["--device", "cpu", "--only", "wan", "speed", *folders]
    without = {name: value for name, value in os.environ.items() if name != forked.OWNER}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=without | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-2000:]


def test_measured_rates_are_a_row_that_the_plan_uses(tmp_path, monkeypatch):
    machine = {"what": "test_speed.py::test_machine", "device": "NVIDIA H200", "GiB": 139.8}
    machine |= {"TFLOP/s of 8,192 rows": 700.0, "TFLOP/s of 18,018 rows": 720.0}
    machine |= {"TB/s of copies": 3.9, "GB/s from pinned memory": 31.0}
    attention = [
        {"what": "test_attention.py::test_speed[flash-16x18318]", "TFLOP/s": 400.0},
        {"what": "test_attention.py::test_speed[cudnn-16x18318]", "TFLOP/s": 600.0},
    ]
    results = [{"lane": "a", "rows": [machine]}, {"lane": "b", "rows": attention}]
    file = tmp_path / "hardware.yaml"
    gpu_check.write_hardware(results[:1], file)
    assert not file.exists()
    gpu_check.write_hardware(results, file)
    monkeypatch.setenv(MEASURED, str(file))
    found = hardware_of("H200")
    assert found.rate == pytest.approx(642.9, abs=0.1)
    assert found.bandwidth == 3.9 and found.host_link == 31.0
    assert hardware_of_device("NVIDIA H200", 100.0).rate == found.rate
    assert hardware_of("H100").rate == 600.0
    assert assumed_hardware() == found
    monkeypatch.setenv(MEASURED, str(tmp_path / "absent.yaml"))
    with pytest.raises(ValueError, match="absent.yaml"):
        assumed_hardware()
    monkeypatch.delenv(MEASURED)
    assert assumed_hardware().name == "H100"
    assert hardware_of("H200").rate == 600.0 and hardware_of("H200").peak == found.peak


def test_a_missing_gpu_is_reported(capsys, tmp_path):
    if torch.cuda.is_available():
        return
    with pytest.raises(SystemExit) as ended:
        main(["speed", "--output_dir", str(tmp_path / "out")])
    assert ended.value.code == 2 and "device cuda" in capsys.readouterr().err
