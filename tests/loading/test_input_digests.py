"""Digests of what a run reads: as it is parsed, so that a comment or an empty line is no change."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from hyvideo.files.digests import digest_large_file
from hyvideo.files.files import ROOT
from hyvideo.loading.input_digests import (
    MODELS,
    changed_inputs,
    digest_inputs,
    digest_models,
)
from hyvideo.models.lora import LoraPair
from hyvideo.models.lora_saving import save_lora
from hyvideo.settings.config import Config
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.training.rewards import reward_digests


def digests(config):
    return digest_inputs(config, RunInputs(config), {"text"})


def change_last_bytes(file):
    content = bytearray(file.read_bytes())
    content[-8:] = bytes(byte ^ 1 for byte in content[-8:])
    file.write_bytes(content)


def test_an_initial_lora_counts(tiny_config, tmp_path):
    pair = LoraPair(torch.ones(2, 4), torch.ones(4, 2), 4.0)
    save_lora({"transformer_blocks.0.attn.to_q": pair}, tmp_path, form="peft")
    config = tiny_config.with_settings(pretrained_lora_path=str(tmp_path))
    before = digests(config)
    changed = replace(pair, alpha=2.0)
    save_lora({"transformer_blocks.0.attn.to_q": changed}, tmp_path, form="peft")
    assert changed_inputs(before, digests(config)) == ["pretrained_lora_path"]


@pytest.mark.parametrize(
    "file, model",
    [("transformer/miniature/*.safetensors", "transformer"), ("vae/*.safetensors", "vae")],
)
def test_each_model_has_its_own_digest_which_a_moved_folder_keeps(tmp_path, file, model):
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    config = Config.of_version("miniature").with_settings(pretrained_model_root=str(root))
    before = digest_models(config.model, {"text"})
    assert list(before) == [f"{MODELS}{name}" for name in ("transformer", "vae", "text")]
    (root / "vae" / "README.md").write_text("notes")
    moved = root.rename(tmp_path / "moved")
    config = config.with_settings(pretrained_model_root=str(moved))
    assert digest_models(config.model, {"text"}) == before
    (path,) = moved.glob(file)
    change_last_bytes(path)
    assert changed_inputs(before, digest_models(config.model, {"text"})) == [f"{MODELS}{model}"]
    assert digest_models(config.with_settings(random_weights=True).model, {"text"}) == {}


def test_the_weights_of_a_reward_model_count(tiny_config, tmp_path):
    root = shutil.copytree(ROOT / "assets" / "miniature", tmp_path / "root")
    config = tiny_config.with_settings(
        reward_model=["miniature_videoalign"],
        reward_config=json.dumps({"miniature_videoalign": {"path": str(root)}}),
    )
    before = reward_digests(config, {})
    change_last_bytes(root / "VideoReward" / "checkpoint-1" / "model.pth")
    assert changed_inputs(before, reward_digests(config, {})) == [
        "reward_model/miniature_videoalign"
    ]


def test_samples_of_a_large_file_find_a_changed_part(tmp_path):
    """Such as the attention matrices of a merged LoRA, between layers that are equal."""
    content = bytes(2**24)
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    before = digest_large_file(file)
    part = 2**20
    file.write_bytes(content[: 5 * part] + b"1" * part + content[6 * part :])
    assert digest_large_file(file) != before
    file.write_bytes(content + b"1")
    assert digest_large_file(file) != before
