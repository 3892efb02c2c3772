"""Names and settings of the original, both ways: no bit changes, and what is not Wan's is refused."""

import json

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

from hyvideo.models import original_checkpoint
from hyvideo.models.family import new_model
from hyvideo.models.loading import load_transformer, read_task
from hyvideo.models.saving import save_original
from hyvideo.models.wan.settings import (
    transformer_config_to_diffusers,
    transformer_config_to_original,
    transformer_to_diffusers,
    transformer_to_original,
)
from tests.models.wan.tiny import FAMILY, tiny

# config.json of Wan2.1-T2V-1.3B.
ORIGINAL = {
    "_class_name": "WanModel",
    "model_type": "t2v",
    "dim": 1536,
    "ffn_dim": 8960,
    "freq_dim": 256,
    "in_dim": 16,
    "out_dim": 16,
    "num_heads": 12,
    "num_layers": 30,
    "text_len": 512,
    "eps": 1e-6,
}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_tensor_of_the_released_model_has_a_name_of_the_original_that_diffusers_knows():
    with torch.device("meta"):
        state = new_model(FAMILY.transformer, transformer_config_to_diffusers(ORIGINAL)).state_dict()
    original = transformer_to_original(state)
    assert len(original) == len(state) == 825
    assert {"blocks.29.norm3.bias", "blocks.0.modulation", "head.modulation", "head.head.weight"} <= original.keys()
    assert convert_wan_transformer_to_diffusers(dict(original)).keys() == state.keys()


def test_names_go_both_ways_as_by_diffusers_converter():
    state = tiny().state_dict()
    original = transformer_to_original(state)
    assert_same(transformer_to_diffusers(original), state)
    assert_same(convert_wan_transformer_to_diffusers(dict(original)), state)


@pytest.mark.parametrize("name", ["blocks.0.attn1.to_q.weight", "blocks.0.self_attn.q.lora_A.weight", "rope.freqs_cos"])
def test_a_name_that_is_not_the_originals_is_refused(name):
    with pytest.raises(ValueError, match=f"tensor '{name}' .* is no tensor of an original Wan transformer"):
        transformer_to_diffusers({name: torch.zeros(1)})


@pytest.mark.parametrize("direction", ["vae_to_diffusers", "vae_to_original"])
def test_names_of_no_vae_are_refused_though_wans_vae_has_one_layout(direction):
    with pytest.raises(ValueError, match="'other.weight'.* is no tensor of"):
        getattr(original_checkpoint, direction)({"other.weight": torch.zeros(1)})


def test_settings_go_both_ways_and_leave_out_what_the_original_leaves_out():
    arguments = transformer_config_to_diffusers(ORIGINAL)
    assert (arguments["attention_head_dim"], arguments["text_dim"], arguments["patch_size"]) == (128, 4096, (1, 2, 2))
    assert transformer_config_to_original(arguments) == ORIGINAL
    five = arguments | {"in_channels": 48, "out_channels": 48}
    assert transformer_config_to_original(five)["model_type"] == "ti2v"
    other = arguments | {"patch_size": (1, 1, 1), "text_dim": 32}
    assert transformer_config_to_diffusers(transformer_config_to_original(other)) == other


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model_type": "i2v"}, "'model_type' must be 't2v' or 'ti2v', got 'i2v'"),
        ({"text_len": 226}, "'text_len' must be 512, got 226"),
        ({"cross_attn_norm": False}, "'cross_attn_norm' must be True, got False"),
        ({"dim": 1537}, "'dim' must be a multiple"),
        ({"num_layers": "30"}, "'num_layers' must be an integer of at least 1, got '30'"),
        ({"eps": None}, "'eps' must be a positive number, got None"),
    ],
)
def test_settings_that_the_class_cannot_have_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        transformer_config_to_diffusers(ORIGINAL | change)


def test_a_folder_of_diffusers_is_loaded_to_the_bit(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "transformer")
    assert_same(load_transformer(tmp_path, None).state_dict(), model.state_dict())


@pytest.mark.parametrize("sizes", [{}, {"patch_size": (1, 1, 1), "text_dim": 4096, "eps": 1e-5}])
def test_a_folder_of_the_original_gives_every_bit_back(tmp_path, sizes):
    model, folder = tiny(**sizes), tmp_path / "transformer" / "mine"
    save_original(model, folder, dtype=torch.float32)
    assert json.loads((folder / "config.json").read_text())["_class_name"] == "WanModel"
    assert "blocks.1.cross_attn.norm_k.weight" in load_file(folder / "diffusion_pytorch_model.safetensors")
    back = load_transformer(tmp_path, "mine")
    assert_same(back.state_dict(), model.state_dict())
    assert (back.config.eps, tuple(back.config.patch_size)) == (model.config.eps, tuple(model.config.patch_size))
    assert read_task(tmp_path, "mine") in ("t2v", None)
