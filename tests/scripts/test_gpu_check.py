"""gpu_check with tiny models on the CPU, so that every check has run before it runs on a GPU."""

import json

import pytest

from scripts.gpu_check import CHECKS, main
from tests.conftest import ROOT


def test_every_check_passes_with_tiny_models_on_a_cpu(tmp_path, monkeypatch, forked_programs):
    monkeypatch.chdir(ROOT)
    code = main([*CHECKS, "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "gpu.json").read_text())
    failed = [result for result in results if not result["ok"]]
    assert not failed and code == 0
    rows = {result["check"]: result["rows"] for result in results}
    assert list(rows) == list(CHECKS["right"] | CHECKS["fast"] | CHECKS["weights"])
    assert len(rows["tests"]) > 8  # one row per test
    assert len(rows["profile"][0].keys() - {"what", "ok", "seconds"}) == 20
    assert [row["difference"] < 0.02 for row in rows["forward"]] == [True] * 3  # eager, compiled and diffusers'
    for how in ("eager", "compiled"):
        assert [row["grad"] for row in rows[f"on_policy_{how}"] if "grad" in row] == [0]
    for check, is_deterministic in (("runs", False), ("deterministic", True)):
        resumed = [row for row in rows[check] if row["what"] == "test_resume"]
        assert [(row["deterministic"], row["bit for bit"]) for row in resumed] == [(is_deterministic, True)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["right", "--device", "cpu", "--tiny", "--only", "speed"], "--only must name checks among machine, tests"),
        (["weights", "--device", "cpu"], "weights needs --model_path, the folder"),
        (["right", "--out", "/proc/no/folder"], "the output must be a folder that can be created"),
    ],
)
def test_a_usage_error_exits_with_2_and_a_message(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_gpu_is_reported(capsys, tmp_path):
    import torch

    if torch.cuda.is_available():
        return
    with pytest.raises(SystemExit) as ended:
        main(["right", "--out", str(tmp_path)])
    assert ended.value.code == 2 and "device cuda needs a GPU" in capsys.readouterr().err
