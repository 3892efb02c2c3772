"""Image-to-video of Wan2.1, which attends to CLIP's features of the first frame: diffusers' states,
velocity and guided latents, names, and LoRAs.

tests/golden/wan_i2v has outputs of diffusers' WanImageToVideoPipeline with a tiny random model in the
released layout, in float32.
"""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

from hyvideo.data.prompts import Request
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.loading.model_setup import load_encoder, load_pipeline
from hyvideo.models.conditions import ImageCondition
from hyvideo.models.family import install, new_model
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import (
    add_lora,
    add_trainable_lora,
    current_lora,
    fit_lora,
    training_config,
)
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from hyvideo.models.saving import save_original
from hyvideo.models.sizes import released_sizes
from hyvideo.models.wan.settings import (
    transformer_config_to_diffusers,
    transformer_config_to_original,
    transformer_to_diffusers,
    transformer_to_original,
)
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from tests.cuda.speed import relative_difference
from tests.models.wan.tiny import FAMILY, inputs, tiny

GOLDEN = Path(__file__).parents[2] / "golden" / "wan_i2v"
PROMPT, NEGATIVE = "a red car turns left", "a car"
SIZE = (9, 64, 96)  # frames, height, width: 3 x 8 x 12 latents
CPU = torch.device("cpu")
FEATURES = {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 72}


def tiny_with_features(**sizes):
    return tiny(**FEATURES | sizes)


def with_features(batch=2):
    """Return inputs whose conditions have a given video and 257 features of its first frame."""
    arguments = inputs(batch)
    generator = torch.Generator().manual_seed(6)
    conditions = []
    for sample in arguments["conditions"]:
        given = torch.randn(arguments["latents"].shape[1:], generator=generator)
        features = torch.randn(257, 20, generator=generator)
        conditions.append(replace(sample, image=ImageCondition(features, given)))
    return arguments | {"conditions": conditions}


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return Path(shutil.copytree(GOLDEN / "i2v", tmp_path_factory.mktemp("golden") / "i2v"))


def config_of(root):
    settings = {
        "pretrained_model_root": str(root),
        "transformer_version": "wan2.1_i2v_14b_480p",
        "dtype": "fp32",
        "encoder_dtype": "fp32",
        "vae_dtype": "fp32",
        "vae_tile_size": 0,
        "sample_n_frames": SIZE[0],
        "height": SIZE[1],
        "width": SIZE[2],
        "cfg_scale": 5.0,
        "negative_prompt": NEGATIVE,
    }
    return Config().with_settings(**settings).resolved()


@pytest.fixture(scope="module")
def loaded(root):
    config = config_of(root)
    encoder, vae = load_encoder(config, CPU)
    kinds = frozenset({"text", "image"})
    pipeline = load_pipeline(config, CPU, encoder=encoder, vae=vae, kinds=kinds)
    return encoder([Request(PROMPT, str(GOLDEN / "first.png"))], SIZE), pipeline


def test_texts_features_and_given_video_equal_diffusers(loaded, golden):
    (condition,) = loaded[0].samples
    torch.testing.assert_close(condition.text, golden["text"], atol=1e-6, rtol=1e-6)
    features = condition.image.embeds
    torch.testing.assert_close(features, golden["i2v.clip_states"][0], atol=1e-5, rtol=0)
    given = golden["i2v.condition"][0, 4:]
    torch.testing.assert_close(condition.image.latents, given, atol=1e-5, rtol=0)


def test_guided_latents_equal_diffusers(loaded, golden):
    conditions, pipeline = loaded
    found = pipeline.sample_ode(conditions, golden["noise"], Schedule.ode(3, 3.0))
    difference = relative_difference(found[0], golden["i2v.latents"][-1])
    print(f"difference {difference:.2g}")
    assert difference <= 2e-6


def test_the_features_change_the_velocity(golden):
    model, arguments = tiny_with_features(), with_features(1)
    install(model)
    (sample,) = arguments["conditions"]
    other = replace(sample, image=ImageCondition(-sample.image.embeds, sample.image.latents))
    with torch.no_grad():
        first = model(**arguments)
        second = model(**arguments | {"conditions": [other]})
    assert relative_difference(second, first) > 0.01


# --- files ----------------------------------------------------------------------------------------


def test_the_released_model_has_its_number_of_parameters_and_tensors():
    sizes = released_sizes("wan2.1_i2v_14b_480p")
    with torch.device("meta"):
        arguments = {name: value for name, value in sizes.transformer.items() if name[0] != "_"}
        model = new_model(FAMILY.transformer, arguments)
    state = model.state_dict()
    assert len(state) == 1303
    assert sum(tensor.numel() for tensor in state.values()) == 16_394_878_784
    original = transformer_to_original(state)
    assert {"img_emb.proj.4.weight", "blocks.39.cross_attn.k_img.bias"} <= original.keys()
    assert convert_wan_transformer_to_diffusers(dict(original)).keys() == state.keys()


def test_names_and_settings_of_the_original_round_trip(tmp_path):
    model = tiny_with_features(text_dim=4096)
    state = model.state_dict()
    renamed = transformer_to_diffusers(transformer_to_original(state))
    assert all(torch.equal(renamed[name], tensor) for name, tensor in state.items())
    config = transformer_config_to_original(model.config)
    assert config["model_type"] == "i2v"
    assert transformer_config_to_diffusers(config)["image_dim"] == 20
    save_original(model, tmp_path / "transformer" / "mine", dtype=torch.float32)
    loaded = load_transformer(tmp_path, "mine")
    assert loaded.config.added_kv_proj_dim == 72


def test_a_missing_or_cut_image_encoder_is_named_before_anything_is_loaded(root, tmp_path):
    requests = [Request(PROMPT, str(GOLDEN / "first.png"))]
    version = "wan2.1_i2v_14b_480p"
    assert not check_checkpoint(root, version, requests)
    broken = Path(shutil.copytree(root, tmp_path / "broken"))
    (broken / "image_encoder" / "model.safetensors").unlink()
    (problem,) = check_checkpoint(broken, version, requests)
    assert "image encoder" in problem
    shutil.rmtree(broken / "image_processor")
    (problem,) = check_checkpoint(broken, version, requests)
    assert "preprocessor_config.json" in problem


@pytest.mark.parametrize(
    "change", [{"pos_embed_seq_len": 514}, {"added_kv_proj_dim": None}, {"in_channels": 4}]
)
def test_other_models_with_features_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        tiny_with_features(**change)


# --- LoRA -----------------------------------------------------------------------------------------


def trained_lora(model):
    """Return an adapter of all matrices of the blocks with random values."""
    add_trainable_lora(model, training_config(model, rank=3, alpha=6.0))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return current_lora(model)


@pytest.mark.parametrize("form", ["diffusers", "original"])
def test_a_lora_covers_the_features_and_is_read_back(tmp_path, form):
    model = tiny_with_features()
    install(model)
    twin = copy.deepcopy(model)
    lora = trained_lora(model)
    assert {"blocks.1.attn2.add_k_proj", "blocks.0.attn2.add_v_proj"} <= lora.keys()
    assert len(lora) == 2 * 12
    save_lora(lora, tmp_path, form=form)
    add_lora(twin, read_lora(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(
            twin(**with_features()), model(**with_features()), rtol=1e-4, atol=1e-5
        )


def test_a_model_without_features_takes_the_other_modules_of_the_lora(tmp_path):
    lora = trained_lora(tiny_with_features())
    with pytest.warns(UserWarning, match="4 modules .* left out"):
        fit_lora(tiny(), lora)
    assert len(lora) == 2 * 10 and not [name for name in lora if ".add_" in name]
