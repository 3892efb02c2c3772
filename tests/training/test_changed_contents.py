"""Resuming with changed files, and saving again on a signal after a failed write."""

import pytest
import torch

from hyvideo.distributed import checkpoint_loading
from hyvideo.trainer import Trainer
from hyvideo.training.preemption import Stopped

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_config, tmp_path):
    """A run with its own prompt file, which tests can change."""
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\na red circle moves left\na blue square moves up\n")
    return tiny_config.with_settings(prompts_csv=str(path), max_steps=1, save_interval=1)


def change_prompts(config):
    with open(*config.data.prompts_csv, "a") as file:
        file.write("a green triangle moves right\n")


@pytest.mark.slow
def test_a_run_does_not_resume_with_changed_prompts_in_the_same_file(config, mesh):
    Trainer(config, mesh, CPU).train()
    config = config.with_settings(max_steps=2, resume_from_checkpoint="latest")
    Trainer(config, mesh, CPU)
    change_prompts(config)
    with pytest.raises(ValueError, match="contents of prompts_csv .*prompts.csv have changed"):
        Trainer(config, mesh, CPU)
    changed = Trainer(
        config.with_settings(allow_changed_settings=True), mesh, CPU
    ).run.state.changed_settings
    assert any("contents of prompts_csv" in message for message in changed)


def test_a_stopped_run_retries_a_checkpoint_that_could_not_be_written(config, mesh, monkeypatch):
    trainer = Trainer(config.with_settings(max_steps=3, save_asynchronously=False), mesh, CPU)
    save = checkpoint_loading.dcp.save

    def fail_once(*_, **__):
        trainer.run.signals.received = "SIGTERM"
        monkeypatch.setattr(checkpoint_loading.dcp, "save", save)
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_loading.dcp, "save", fail_once)
    with pytest.raises(Stopped):
        trainer.train()
    assert [path.name for path in checkpoint_loading.complete(trainer.output_dir)] == ["000001"]
