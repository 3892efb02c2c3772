"""Resuming with changed files, and saving again on a signal after a failed write."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from hyvideo.data.files import ROOT
from hyvideo.distributed import checkpoint_loading
from hyvideo.models.lora import Pair, save_lora
from hyvideo.settings.config import Config
from hyvideo.trainer import Trainer
from hyvideo.training import run_setup
from hyvideo.training.model_setup import _weights_hash, weight_hashes
from hyvideo.training.preemption import Stopped
from hyvideo.training.run_state import SERVICE, changed_contents, hash_files

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


def change_last_bytes(file):
    content = bytearray(file.read_bytes())
    content[-8:] = bytes(byte ^ 1 for byte in content[-8:])
    file.write_bytes(content)


def test_a_run_does_not_resume_with_other_weights_of_the_base_model(config, mesh, tmp_path):
    """The checkpoint of a LoRA has no weights of the base model."""
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    config = config.with_settings(
        pretrained_model_root=str(root), random_weights=False, lora_rank=2, valid_video_csv=""
    )
    Trainer(config, mesh, CPU).train()
    config = config.with_settings(max_steps=2, resume_from_checkpoint="latest")
    moved = config.with_settings(pretrained_model_root=str(root.rename(tmp_path / "moved")))
    Trainer(moved, mesh, CPU)
    (file,) = (tmp_path / "moved/transformer/miniature").glob("*.safetensors")
    change_last_bytes(file)
    message = r"weights of the base model \(transformer\) in pretrained_model_root .*moved"
    with pytest.raises(ValueError, match=message):
        Trainer(moved, mesh, CPU)


@pytest.mark.system
def test_a_run_does_not_resume_with_other_weights_of_the_reward_model(config, mesh, tmp_path):
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    config = config.with_settings(
        reward_model=["miniature_videoalign"],
        reward_config=json.dumps({"miniature_videoalign": {"path": str(root)}}),
        valid_video_csv="",
    )
    Trainer(config, mesh, CPU).train()
    config = config.with_settings(max_steps=2, resume_from_checkpoint="latest")
    Trainer(config, mesh, CPU)
    change_last_bytes(root / "VideoReward" / "checkpoint-1" / "model.pth")
    with pytest.raises(ValueError, match="weights of reward_model miniature_videoalign have chang"):
        Trainer(config, mesh, CPU)


def test_another_reward_model_of_a_service_is_named():
    settings = {"remote_reward_url": "http://127.0.0.1:8000"}
    (message,) = changed_contents({SERVICE: "one"}, {SERVICE: "two"}, Config().flat() | settings)
    assert message.startswith(
        "the reward model of the service at remote_reward_url http://127.0.0.1:8000 has changed"
    )


@pytest.mark.parametrize(
    "file, model",
    [
        ("transformer/miniature/*.safetensors", "transformer"),
        ("vae/*.safetensors", "vae"),
        ("text_encoder/llm/*.safetensors", "text"),
    ],
)
def test_each_model_has_its_own_hash(tmp_path, file, model):
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    settings = Config.of_version("miniature").model
    settings = replace(settings, pretrained_model_root=str(root))
    before = weight_hashes(settings, {"text"})
    assert list(before) == ["transformer", "vae", "text"]
    (root / "vae" / "README.md").write_text("notes")
    assert weight_hashes(settings, {"text"}) == before
    (path,) = root.glob(file)
    change_last_bytes(path)
    after = weight_hashes(settings, {"text"})
    assert [name for name in before if before[name] != after[name]] == [model]
    assert weight_hashes(replace(settings, random_weights=True), {"text"}) == {}


def test_samples_of_a_large_file_find_a_changed_part(tmp_path):
    """Such as the attention matrices of a merged LoRA, between layers that are equal."""
    content = bytes(2**24)
    (tmp_path / "a.safetensors").write_bytes(content)
    before = _weights_hash([tmp_path])
    part = 2**20
    (tmp_path / "a.safetensors").write_bytes(
        content[: 5 * part] + b"1" * part + content[6 * part :]
    )
    assert _weights_hash([tmp_path]) != before


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
