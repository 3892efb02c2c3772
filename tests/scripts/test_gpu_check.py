"""gpu_check with tiny models on the CPU, so that every check has run before it runs on a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.models.family import prepare
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning.flops import count_parameters
from hyvideo.planning.hardware import MEASURED, hardware_of, hardware_of_device
from scripts import gpu_check
from scripts.gpu_check import NUMBERS, PARTS, main
from tests import forked
from tests.conftest import ROOT
from tests.cuda import full_width, workload
from tests.cuda.speed import Workload


@pytest.mark.slow
def test_every_check_passes_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = ["--output_dir", str(tmp_path / "out")]
    code = main(["all", "weights", "--tiny", "--device", "cpu", *folders])
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    failed = [result for result in results if not result["ok"]]
    assert not failed and code == 0
    rows = {result["check"]: result["rows"] for result in results}
    assert list(rows) == [*(name for checks in PARTS.values() for name in checks), "parity"]
    assert all(rows.values())
    assert len(rows["profile"][0].keys() - {"what", "ok", "seconds"}) == 20
    for how in ("eager", "compiled"):
        assert [row["grad"] for row in rows[f"on_policy_{how}"] if "grad" in row] == [0]
    assert [(row["deterministic"], row["bit for bit"]) for row in rows["resume"]] == 2 * [
        (True, True)
    ]
    pilots = rows["pilot_wan"] + rows["pilot_hunyuanvideo"]
    assert all(row["iteration 1, s"] > 0 and row["time/update"] > 0 for row in pilots)
    found = {(check, name) for check, each in rows.items() for row in each for name in row}
    only_on_a_gpu = {("machine", "TB/s of copies")}
    named = {(number.check, number.value) for number in NUMBERS} - only_on_a_gpu
    assert named <= found  # the summary names values that the checks record
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"gpu.json", "gpu.md", "gpu.log", gpu_check.KERNELS}


@pytest.mark.system
def test_the_first_checks_pass_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    chosen = ["machine", "attention", "on_policy_eager", "copies"]
    folders = ["--output_dir", str(tmp_path / "out")]
    code = main(["eager", "more", "--only", *chosen, "--tiny", "--device", "cpu", *folders])
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert code == 0 and [(result["check"], result["ok"]) for result in results] == [
        (name, True) for name in chosen
    ]
    assert [row["grad"] for row in results[2]["rows"] if "grad" in row] == [0]


def test_the_checkpoints_of_the_pilots_have_the_released_sizes(tmp_path):
    version = "wan2.1_t2v_1.3b"
    full_width.write(tmp_path / "checkpoints", version, ["a cat"], is_tiny=False)
    released = released_sizes(version)
    written = read_architecture(tmp_path / "checkpoints", version)
    assert count_parameters(written) == count_parameters(released)
    assert written.image_tokens(81, 480, 832) == released.image_tokens(81, 480, 832)
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
    command = [sys.executable, "-m", "scripts.gpu_check", "eager", "pilots", "--tiny"]
    command += ["--device", "cpu", "--only", "machine", "pilot_wan", *folders]
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


def test_each_part_fits_one_call_and_the_first_four_half_an_hour():
    limits = [sum(check.seconds for check in checks.values()) for checks in PARTS.values()]
    assert max(limits) <= 570 and sum(limits[:4]) <= 28 * 60
    for checks in PARTS.values():
        assert all(check.seconds >= 1.5 * check.expected for check in checks.values())


def test_kernels_are_carried_from_one_part_to_the_next(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "compiled/triton").mkdir(parents=True)
    (first / "compiled/triton/kernel.cubin").write_bytes(b"kernel")
    gpu_check.pack_kernels(second, tmp_path / "none.tar.xz")
    gpu_check.pack_kernels(first, tmp_path / "kernels.tar.xz")
    gpu_check.unpack_kernels(tmp_path / "kernels.tar.xz", second)
    assert (second / "compiled/triton/kernel.cubin").read_bytes() == b"kernel"
    assert not (tmp_path / "none.tar.xz").exists()
    with pytest.raises(ValueError, match="--kernels"):
        gpu_check.unpack_kernels(tmp_path / "none.tar.xz", second)


def test_measured_rates_are_a_row_that_the_plan_uses(tmp_path, monkeypatch):
    machine = {"what": "test_machine", "device": "NVIDIA H200", "GiB": 139.8}
    machine |= {"TFLOP/s of 8,192 rows": 700.0, "TFLOP/s of 18,018 rows": 720.0}
    machine["TB/s of copies"] = 3.9
    attention = [
        {"what": "test_speed[flash-18318]", "TFLOP/s": 400.0},
        {"what": "test_speed[cudnn-18318]", "TFLOP/s": 600.0},
    ]
    results = [{"check": "machine", "rows": [machine]}, {"check": "attention", "rows": attention}]
    file = tmp_path / "hardware.yaml"
    gpu_check.write_hardware(results[:1], file)
    assert not file.exists()
    gpu_check.write_hardware(results, file)
    monkeypatch.setenv(MEASURED, str(file))
    found = hardware_of("H200")
    assert found.rate == pytest.approx(642.9, abs=0.1) and found.bandwidth == 3.9
    assert hardware_of_device("NVIDIA H200", 100.0).rate == found.rate
    assert hardware_of("H100").rate == 600.0
    monkeypatch.delenv(MEASURED)
    assert hardware_of("H200").rate == 600.0 and hardware_of("H200").peak == found.peak


def test_blocks_run_eagerly_after_a_failed_compilation(tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "DEVICE", torch.device("cpu"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    work = Workload(torch.device("cpu"), sizes=workload.TINY_MODEL, grid=(1, 2, 2), text_tokens=4)
    model = work.transformer()
    prepare(model, {"text"})
    workload.arrange(model, compile=True)
    assert (
        workload.compile_problem() == ""
        and model.transformer_blocks[0]._compiled_call_impl is not None
    )
    (tmp_path / workload.COMPILE_FAILED).write_text("RuntimeError: PassManager::run failed")
    workload.arrange(model, compile=True)
    assert (
        "PassManager" in workload.compile_problem()
        and model.transformer_blocks[0]._compiled_call_impl is None
    )


def test_a_missing_gpu_is_reported(capsys, tmp_path):
    if torch.cuda.is_available():
        return
    with pytest.raises(SystemExit) as ended:
        main(["eager", "--output_dir", str(tmp_path / "out")])
    assert ended.value.code == 2 and "device cuda" in capsys.readouterr().err
