"""Checkpoints of one layout go on in another, and a run that goes on where it stopped is the run that did not stop."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import launch
from tests.distributed.test_same_run import FSDP, LORA, SETTINGS, Choosy

MODULE = "tests.distributed.test_resharding"
EVERYTHING = -1.0  # every video is scored
LAYOUTS = {
    "4": {"batch_size": 4, "sp_size": 2, **FSDP},
    "2": {"batch_size": 8, "sp_size": 2, **FSDP},
    "1": {"batch_size": 8},
}


def train(folder, settings, max_steps, resume):
    """Trains to ``max_steps``; the main rank then has its last metrics and writes what it holds."""
    import torch
    from safetensors.torch import save_file

    from hyvideo.config.command_line import load_config
    from hyvideo.distributed import mesh as ranks
    from hyvideo.distributed.sharded_tensors import whole
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
    trainer = Trainer(config, mesh, cpu, scorers={"test": Choosy(EVERYTHING)})
    trainer.train()
    tensors = {name: whole(tensor).contiguous().clone() for name, tensor in trainer.policy.tensors().items()}
    if mesh.is_main:
        save_file(tensors, Path(folder) / "tensors.safetensors")


def train_each(runs):
    for arguments in runs:
        train(*arguments)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if not name.startswith(("time/", "memory/"))} for line in lines]


@pytest.mark.parametrize(
    "kind, later", [({}, (1,)), pytest.param(LORA, (2, 1), marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_a_checkpoint_goes_on_in_any_layout_and_bitwise_in_its_own(tmp_path, kind, later):
    run, again = str(tmp_path / "run"), {number: tmp_path / f"again{number}" for number in (4, *later)}
    first = str(tmp_path / "run" / "checkpoints" / "000001")
    of_four = LAYOUTS["4"] | kind
    launch(f"{MODULE}:train_each", 4, [[run, of_four, 2, ""], [str(again[4]), of_four, 2, first]])
    for number in later:
        launch(f"{MODULE}:train", number, str(again[number]), LAYOUTS[str(number)] | kind, 2, first)
    unbroken = load_file(tmp_path / "run" / "tensors.safetensors")
    for number, folder in again.items():
        found = load_file(folder / "tensors.safetensors")
        assert found.keys() == unbroken.keys()
        worst = max((found[name] - tensor).abs().max().item() for name, tensor in unbroken.items())
        assert worst == 0 if number == 4 else worst <= 1e-6, (number, worst)
    assert [line["iteration"] for line in metrics(again[1])] == [2]
    assert metrics(again[4]) == metrics(tmp_path / "run")[1:]


def test_the_policy_of_a_sharded_run_is_read_by_one_process(tmp_path):
    """Of the running average too, which then is the policy."""
    import torch

    from hyvideo.training import saved_policy

    run = tmp_path / "run"
    launch(f"{MODULE}:train", 2, str(run), LAYOUTS["2"], 1, "")
    tensors = load_file(run / "tensors.safetensors")
    folder = run / "checkpoints" / "000001"
    saved_policy.check_policy("assets/miniature", "miniature", folder)
    model = saved_policy.load(folder, root=Path("assets/miniature"), version="miniature", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        expected = tensors.get(f"average.{name}", tensors[f"policy.{name}"])
        assert torch.equal(tensor, expected), name
    assert any(name.startswith("average.") for name in tensors)
