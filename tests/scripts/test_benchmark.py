"""The benchmarks run to their end and print what they measured, small."""

import json

import pytest
import torch

from scripts.benchmark import main
from tests.conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch, capsys):
    """What a sub-command prints."""
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()

    def run(*arguments):
        assert main([*arguments, "--repeats", "1"]) == 0
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)  # a trainer sets its own


@pytest.mark.parametrize("stage", ["forward", pytest.param("training", marks=pytest.mark.slow)])
def test_our_transformer_computes_what_diffusers_does_and_both_are_timed(benchmark, stage):
    small = ("--layers", "1", "--grid", "1", "2", "2", "--valid", "8", "--only", stage)
    lines = benchmark("transformer", *small).splitlines()
    (difference,) = (line.split()[3] for line in lines if line.startswith("outputs: "))
    assert float(difference) < 1e-5
    assert [line.split()[1] for line in lines if line.split()[0] == stage] == ["ours:", "stock:", "ours"]


def test_an_iteration_is_timed_beside_its_model_calls(benchmark):
    numbers = json.loads(benchmark("overhead", "--config", "configs/smoke.yaml", "--json"))
    assert numbers["ratio"] == pytest.approx(numbers["iteration"] / numbers["bare"])  # one pair


@pytest.mark.slow
def test_clips_are_scored_together_and_one_by_one_alike(benchmark):
    lines = benchmark("reward", "--config", "configs/smoke.yaml", "--reward_model", "miniature", "--clips", "2")
    lines = lines.splitlines()
    (difference,) = (line.split()[-1] for line in lines if line.startswith("largest difference"))
    assert float(difference) < 1e-4
    assert lines[-1].strip().startswith("waiting for rewards: ")


def test_a_file_that_is_not_there_ends_with_2_and_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reward", "--model_path", "nowhere", "--reward_model", "videoalign"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("benchmark.py: ")
