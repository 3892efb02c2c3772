"""gpu_check with tiny models on the CPU, so that every check has run before it runs on a GPU."""

import json

import pytest
import torch

from hyvideo.models.family import prepare
from hyvideo.models.fit_checks import check_checkpoint
from hyvideo.models.sizes import read_architecture, released_sizes
from hyvideo.planning.flops import count_parameters
from scripts.gpu_check import NUMBERS, PARTS, main
from tests.conftest import ROOT
from tests.cuda import full_width, workload
from tests.cuda.speed import Workload


@pytest.mark.slow
def test_every_check_passes_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = ["--output_dir", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")]
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
    assert [(row["deterministic"], row["bit for bit"]) for row in rows["resume"]] == [(True, True)]
    pilots = rows["pilot_wan"] + rows["pilot_hunyuanvideo"]
    assert all(row["iteration 1, s"] > 0 and row["time/update"] > 0 for row in pilots)
    found = {(check, name) for check, each in rows.items() for row in each for name in row}
    named = {(number.check, number.value) for number in NUMBERS}
    assert named <= found  # the summary names values that the checks record
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.system
def test_the_first_checks_pass_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    chosen = ["machine", "attention", "on_policy_eager", "copies"]
    folders = ["--output_dir", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")]
    code = main(["eager", "--only", *chosen, "--tiny", "--device", "cpu", *folders])
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
        main(["eager", "--out", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")])
    assert ended.value.code == 2 and "device cuda" in capsys.readouterr().err
