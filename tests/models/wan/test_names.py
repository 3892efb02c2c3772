"""Tests that names and settings of the original convert exactly in both directions and that others
raise errors.
"""

import json

import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

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


def test_all_tensors_of_the_released_model_are_mapped_to_names_that_diffusers_converts():
    with torch.device("meta"):
        state = new_model(
            FAMILY.transformer, transformer_config_to_diffusers(ORIGINAL)
        ).state_dict()
    original = transformer_to_original(state)
    assert len(original) == len(state) == 825
    assert {
        "blocks.29.norm3.bias",
        "blocks.0.modulation",
        "head.modulation",
        "head.head.weight",
    } <= original.keys()
    assert convert_wan_transformer_to_diffusers(dict(original)).keys() == state.keys()


def test_names_round_trip_and_match_diffusers_converter():
    state = tiny().state_dict()
    original = transformer_to_original(state)
    assert_same(transformer_to_diffusers(original), state)
    assert_same(convert_wan_transformer_to_diffusers(dict(original)), state)


def test_settings_round_trip_and_omit_defaults_as_in_the_original():
    arguments = transformer_config_to_diffusers(ORIGINAL)
    assert (arguments["attention_head_dim"], arguments["text_dim"], arguments["patch_size"]) == (
        128,
        4096,
        (1, 2, 2),
    )
    assert transformer_config_to_original(arguments) == ORIGINAL
    wan_5b = arguments | {"in_channels": 48, "out_channels": 48}
    assert transformer_config_to_original(wan_5b)["model_type"] == "ti2v"
    other = arguments | {"patch_size": (1, 1, 1), "text_dim": 32}
    assert transformer_config_to_diffusers(transformer_config_to_original(other)) == other


def test_an_original_folder_round_trips_bit_for_bit(tmp_path):
    model = tiny(patch_size=(1, 1, 1), text_dim=4096, eps=1e-5)
    folder = tmp_path / "transformer" / "mine"
    save_original(model, folder, dtype=torch.float32)
    assert json.loads((folder / "config.json").read_text())["_class_name"] == "WanModel"
    assert "blocks.1.cross_attn.norm_k.weight" in load_file(
        folder / "diffusion_pytorch_model.safetensors"
    )
    loaded = load_transformer(tmp_path, "mine")
    assert_same(loaded.state_dict(), model.state_dict())
    assert (loaded.config.eps, tuple(loaded.config.patch_size)) == (
        model.config.eps,
        tuple(model.config.patch_size),
    )
    assert read_task(tmp_path, "mine") in ("t2v", None)
