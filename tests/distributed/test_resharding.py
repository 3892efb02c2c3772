"""Tests of resuming a checkpoint in another layout, and bit-exact resume in the same layout."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import launch
from tests.distributed.test_same_run import FSDP, SETTINGS, ThresholdScorer, save_tensors
from tests.shallow import SHALLOW

MODULE = "tests.distributed.test_resharding"
EVERYTHING = -1.0  # below every reward
SHORT = {"cfg_scale": 1.0, "grpo_sampling_steps": 3, "num_generations": 2}
TWO_RANKS = FSDP | SHORT | {"batch_size": 2}


def train(folder, settings, max_steps, resume):
    """Train to ``max_steps``; the main rank then writes all tensors."""
    import torch

    from hyvideo.distributed import mesh as ranks
    from hyvideo.settings.command_line import load_config
    from hyvideo.trainer import Trainer

    config = load_config(
        "configs/smoke.yaml",
        **SETTINGS
        | settings
        | {"output_dir": folder, "max_steps": max_steps, "save_interval": 1, "report_to": ["none"]}
        | {"save_total_limit": 0, "resume_from_checkpoint": resume},
    )
    cpu = torch.device("cpu")
    mesh = ranks.start(config.distributed.sp_size, cpu)
    trainer = Trainer(config, mesh, cpu, scorers={"test": ThresholdScorer(EVERYTHING)})
    trainer.train()
    save_tensors(Path(folder) / "tensors.safetensors", trainer.run.policy.tensors())


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: v for name, v in line.items() if not name.startswith(("time/", "memory/", "perf/"))}
        for line in lines
    ]


@pytest.fixture(scope="module")
def two_rank_run(tmp_path_factory):
    """Return the folder of a run of two iterations on two ranks."""
    run = tmp_path_factory.mktemp("run")
    launch(f"{MODULE}:train", 2, str(run), TWO_RANKS, 2, "auto")
    return run


@pytest.mark.system
def test_a_checkpoint_resumes_in_any_layout_and_bit_for_bit_in_its_own(tmp_path, two_rank_run):
    first = str(two_rank_run / "checkpoints" / "000001")
    again, alone = tmp_path / "again", tmp_path / "alone"
    launch(f"{MODULE}:train", 2, str(again), TWO_RANKS, 2, first)
    launch(f"{MODULE}:train", 1, str(alone), SHORT | {"batch_size": 4}, 2, first)
    assert worst_difference(two_rank_run, again) == 0
    assert worst_difference(two_rank_run, alone) <= 1e-6
    assert [line["iteration"] for line in metrics(alone)] == [2]
    assert metrics(again) == metrics(two_rank_run)[1:]


def worst_difference(first, second):
    """Return the largest difference between the tensors of two runs."""
    expected, tensors = (load_file(folder / "tensors.safetensors") for folder in (first, second))
    assert expected.keys() == tensors.keys()
    return max((tensors[name] - tensor).abs().max().item() for name, tensor in expected.items())


@pytest.mark.system
def test_one_process_loads_the_policy_of_a_sharded_run(two_rank_run):
    """If the run has an EMA, its weights are loaded as the policy."""
    import torch

    from hyvideo.loading import saved_policy

    tensors = load_file(two_rank_run / "tensors.safetensors")
    folder = max((two_rank_run / "checkpoints").glob("0*"))
    saved_policy.check_policy(SHALLOW, "miniature", folder)
    assert {tensor.dtype for tensor in saved_policy.load(folder, torch.bfloat16).parameters()} == {
        torch.bfloat16
    }
    model = saved_policy.load(folder, torch.float32)
    for name, tensor in model.state_dict().items():
        expected = tensors.get(f"average.{name}", tensors[f"policy.{name}"])
        assert torch.equal(tensor, expected), name
    assert any(name.startswith("average.") for name in tensors)
