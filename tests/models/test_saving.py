import json

import pytest
import torch
from safetensors.torch import load_file

from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.saving import save_original
from tests.models.checkpoint_files import (
    FILE,
    VERSION,
    assert_same_model,
)


def test_a_saved_transformer_equals_the_file_it_was_loaded_from(
    root, transformer, original_transformer, tmp_path
):
    config, state = original_transformer
    save_original(transformer, tmp_path, dtype=torch.float32)
    saved = load_file(tmp_path / FILE)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in config} == config


def test_a_saved_vae_is_rounded_to_half_precision(root, tmp_path):
    vae = load_vae(root)
    save_original(vae, tmp_path / "vae")
    reloaded = load_vae(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "vae" / FILE).values()} == {
        torch.float16
    }
    assert_same_model(reloaded, vae.half().float())
    assert reloaded.config.scaling_factor == 1.03682


def test_a_weight_too_large_for_half_precision_raises_an_error(transformer, tmp_path):
    with torch.no_grad():
        transformer.proj_out.bias[0] = 1e5
    with pytest.raises(ValueError, match=r"final_layer\.linear\.bias"):
        save_original(transformer, tmp_path)


def test_omitted_tensors_of_a_compact_checkpoint_are_generated(root, tmp_path):
    transformer = load_transformer(root, VERSION, random_weights_seed=5)
    with torch.no_grad():
        transformer.proj_out.weight.mul_(0.5)
    folder = tmp_path / "transformer" / "small"
    save_original(transformer, folder, drawn={"byt5_in.": 5, "vision_in.": 5}, dtype=torch.float32)
    assert (folder / FILE).stat().st_size < 4e6
    assert not any(name.startswith(("byt5_in", "vision_in")) for name in load_file(folder / FILE))
    assert_same_model(load_transformer(tmp_path, "small"), transformer)
