"""Resuming with changed files, and saving again on a signal after a failed write."""

import pytest
import torch

from hyvideo.distributed import checkpoint_loading
from hyvideo.models.lora import Pair, save_lora
from hyvideo.trainer import Trainer
from hyvideo.training import run_setup
from hyvideo.training.preemption import Stopped
from hyvideo.training.run_state import changed_contents, hash_files

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


def test_a_run_does_not_resume_with_a_changed_helper_of_a_scorer(config, mesh, tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "from hyvideo.rewards.rewards import Scorer\n"
        "class Mine(Scorer):\n"
        "    def score(self, videos, prompts, *, fps):\n"
        "        import helper_of_mine\n"
        "        return [{'VQ': 1.0, 'MQ': 1.0, 'TA': 1.0} for _ in videos]\n"
    )
    helper = tmp_path / "helper_of_mine.py"
    helper.write_text("value = 1")
    settings = config.with_settings(reward_model=[f"{tmp_path}/my_rewards.py:Mine"]).flat()
    before = hash_files(settings)
    assert not changed_contents(before, hash_files(settings), settings)
    helper.write_text("value = 2")
    (message,) = changed_contents(before, hash_files(settings), settings)
    assert message == (
        f"the contents of reward_model {tmp_path}/my_rewards.py, {helper} have changed"
    )


def test_a_lora_that_changes_while_the_run_loads_is_rejected(config, mesh, tmp_path, monkeypatch):
    """The run would train another LoRA than the one that its checkpoints record."""
    pair = Pair(torch.zeros(2, 96), torch.zeros(96, 2), 2.0)
    save_lora({"transformer_blocks.0.attn.to_q": pair}, tmp_path / "lora")
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    load = run_setup.load_encoder

    def load_and_change(*inputs, **options):
        changed = {
            "transformer_blocks.0.attn.to_q": Pair(torch.ones(2, 96), torch.zeros(96, 2), 2.0)
        }
        save_lora(changed, tmp_path / "lora")
        return load(*inputs, **options)

    monkeypatch.setattr(run_setup, "load_encoder", load_and_change)
    config = config.with_settings(lora_rank=2, pretrained_lora_path=str(tmp_path / "lora"))
    with pytest.raises(ValueError, match=f"{file} have changed while the run was loading"):
        Trainer(config, mesh, CPU)


@pytest.mark.system
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
