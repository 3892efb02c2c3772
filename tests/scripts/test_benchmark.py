"""The benchmarks run with small sizes and print their measurements."""

import json

import pytest
import torch

from scripts.benchmark import main
from tests.conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch, capsys):
    """A function that runs a sub-command and returns its output."""
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()

    def run(*arguments):
        main([*arguments, "--repeats", "1"])
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)  # a trainer changes it


@pytest.mark.parametrize("stage", ["forward", pytest.param("training", marks=pytest.mark.slow)])
def test_transformer_times_ours_and_diffusers_which_agree(benchmark, stage):
    small = ("--layers", "1", "--grid", "1", "2", "2", "--valid", "8", "--only", stage)
    numbers = dict(line.split(": ") for line in benchmark("transformer", *small).splitlines())
    assert float(numbers[f"{stage}, largest difference"]) < 1e-5
    ours, stock, ratio = (
        float(numbers[f"{stage} {name}"]) for name in ("ours, s", "stock, s", f"ours / {stage} stock")
    )
    assert ratio == pytest.approx(ours / stock, rel=2e-3)  # one pair, to four digits


def test_overhead_times_an_iteration_and_its_model_calls(benchmark):
    numbers = json.loads(benchmark("overhead", "--config", "configs/smoke.yaml", "--json"))
    ratio = numbers["iteration, s"] / numbers["bare calls, s"]
    assert numbers["iteration / bare calls"] == pytest.approx(ratio)  # one pair
    rollouts, guided = 8, 2  # 4 steps, 3 trained
    assert numbers["iteration, evaluations"] == numbers["bare calls, evaluations"] == rollouts * guided * (4 + 3)


@pytest.mark.slow
def test_reward_scores_agree_in_a_batch_and_one_by_one(benchmark):
    small = ("--reward_model", "miniature", "--clips", "2", "--json")
    numbers = json.loads(benchmark("reward", "--config", "configs/smoke.yaml", *small))
    assert numbers["largest difference"] < 1e-4
    assert 0 <= numbers["waiting for rewards, share of an iteration"] < 1


def test_a_missing_file_exits_with_2_and_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reward", "--model_path", "nowhere", "--reward_model", "videoalign"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("benchmark.py: ")
