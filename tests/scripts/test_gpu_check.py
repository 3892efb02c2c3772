"""gpu_check with tiny models on the CPU, so that every check has run before it runs on a GPU."""

import json
import re

import pytest

from scripts.gpu_check import CALLS, CHECKS, main
from tests.conftest import ROOT


@pytest.mark.slow
def test_every_check_passes_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = main([*CHECKS, "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "gpu.json").read_text())
    failed = [result for result in results if not result["ok"]]
    assert not failed and code == 0
    rows = {result["check"]: result["rows"] for result in results}
    assert list(rows) == list(CHECKS["right"] | CHECKS["fast"] | CHECKS["weights"])
    assert len(rows["tests"]) > 8  # one row per test
    check_order_of_compilation(rows)
    assert len(rows["profile"][0].keys() - {"what", "ok", "seconds"}) == 20
    assert [row["difference"] < 0.02 for row in rows["forward"]] == [True] * 3  # eager, compiled and diffusers'
    known = {
        frames: [row["vLLM-Omni on an H200, s"] for row in rows["guided_step"] if f"-{frames}" in row["what"]]
        for frames in (121, 33)
    }
    assert known == {121: [2.59, 2.59], 33: [0.50, 0.50]}  # eager and compiled
    assert [row["counted GB"] for row in rows["counts"]] == [5.95, 11.41, 153.7, 228.6]
    for how in ("eager", "compiled"):
        assert [row["grad"] for row in rows[f"on_policy_{how}"] if "grad" in row] == [0]
    for check, is_deterministic in (("runs", False), ("deterministic", True)):
        resumed = [row for row in rows[check] if row["what"] == "test_resume"]
        assert [(row["deterministic"], row["bit for bit"]) for row in resumed] == [(is_deterministic, True)]


def test_the_first_checks_pass_with_tiny_models_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    chosen = ["machine", "tests", "on_policy_eager"]
    code = main(["right", "--only", *chosen, "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert code == 0 and [(result["check"], result["ok"]) for result in results] == [(name, True) for name in chosen]
    assert len(results[1]["rows"]) > 8  # one row per test
    assert [row["grad"] for row in results[2]["rows"] if "grad" in row] == [0]


def check_order_of_compilation(rows):
    """The check `compile` fills a cache that later checks share, and a check has its eager rows first."""
    assert {row["cache"] for row in rows["compile"]} == {"compiled"}
    for check, results in rows.items():
        is_compiled = ["compiled" in row["what"] for row in results if re.search("eager|compiled", row["what"])]
        assert is_compiled == sorted(is_compiled)
        assert not any(is_compiled) or list(rows).index("compile") < list(rows).index(check)


def test_a_cold_compilation_fits_into_the_limits_of_its_check_and_call():
    """Each of the four models is compiled for two sizes with and without gradient, in at most 90 s (an estimate)."""
    for call in ("right", "fast"):
        checks = CHECKS[call]
        assert checks["compile"].seconds >= 8 * 90
        assert CALLS[call]["seconds"] >= checks["compile"].seconds + 480


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["right", "--device", "cpu", "--tiny", "--only", "speed"], "--only must name checks among machine, compile"),
        (["weights", "--device", "cpu"], "weights needs --pretrained_model_root, the folder"),
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
