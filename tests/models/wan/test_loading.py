"""Tests that all functions that load a Wan transformer set all tensors and round none
unintentionally.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from hyvideo.checkpoints.format import MODEL
from hyvideo.data.prompts import Request
from hyvideo.distributed.sharded_tensors import fill_shards
from hyvideo.loading import saved_policy
from hyvideo.loading.fit_checks import check_checkpoint
from hyvideo.models import loading
from hyvideo.models.family import install
from hyvideo.models.saving import save_original
from hyvideo.models.sizes import read_architecture
from tests.models.wan.tiny import inputs, tiny
from tests.stock_models import stock_twin
from tests.tiny_wan import write_wan


@pytest.fixture
def root(tmp_path):
    tiny().save_pretrained(tmp_path / "transformer")
    return tmp_path


def loaded(root):
    return loading.load_transformer(root, None)


def streamed(root):
    model, weights = loading.stream_transformer(root, None)
    fill_shards(model, weights, device=torch.device("cpu"))
    return model


def overwritten(root):
    model = loading.transformer_on_meta(root, None).to_empty(device="cpu")
    loading.load_transformer_weights(model, root / "transformer")
    return model.eval()


def saved(root):
    return saved_policy.load(root, torch.float32)


def described(root):
    """Build the model from its description file, as for a checkpoint's policy, and fill it."""
    saved_policy.write_model_file(loaded(root), root)
    model = loading.transformer_from_config(root / MODEL)
    model.type(torch.float32).to_empty(device="cpu")
    model.load_state_dict(loaded(root).state_dict())
    return model.eval()


@pytest.mark.parametrize("load", [loaded, streamed, overwritten, saved, described])
def test_all_loading_functions_give_the_same_velocity(root, load):
    model, expected = load(root), tiny()
    assert not list(model.named_buffers())
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    for each in (model, expected):
        install(each)
    with torch.no_grad():
        assert torch.equal(model(**inputs()), expected(**inputs()))


def test_a_bf16_model_has_float32_rotary_tables(root):
    model = loading.load_transformer(root, None).type(torch.bfloat16)
    twin = stock_twin(loading.load_transformer(root, None))
    install(model)
    tables = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: tables.extend(args[3][:2]))
    arguments = inputs(1)
    texts = [
        replace(condition, text=condition.text.bfloat16()) for condition in arguments["conditions"]
    ]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(**arguments | {"conditions": texts})
    expected = twin.rope(arguments["latents"])
    assert all(
        torch.equal(actual.abs(), table[0, :, 0].abs()) for actual, table in zip(tables, expected)
    )


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("transformer/config.json", {"num_attention_heads": "3"}),
        ("vae/config.json", {"z_dim": "4"}),
    ],
)
def test_a_setting_of_the_wrong_type_raises_value_error(tmp_path, file, change):
    path = write_wan(tmp_path) / file
    settings = json.loads(path.read_text()) | change
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError):  # no other exception
        problems = check_checkpoint(tmp_path, "wan2.1_t2v_1.3b", [Request("a car")])
        read_architecture(tmp_path, "wan2.1_t2v_1.3b")
        raise ValueError(*problems) if problems else AssertionError("was accepted")


@pytest.fixture
def original_layout(tmp_path):
    """A folder like Wan-AI/Wan2.1-T2V-1.3B: the transformer at the top, and pickles of the VAE and
    of UMT5.
    """
    source, root = write_wan(tmp_path / "diffusers"), tmp_path / "ckpts" / "Wan2.1-T2V-1.3B"
    save_original(loading.load_transformer(source, None), root, dtype=torch.float32)
    for name in ("Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"):
        torch.save({"weight": torch.zeros(2)}, root / name)
    (root / "google" / "umt5-xxl").mkdir(parents=True)
    shutil.copy(source / "tokenizer" / "tokenizer.json", root / "google" / "umt5-xxl")
    return root


def test_the_original_layout_is_one_problem_with_the_command_that_downloads_the_rest(
    original_layout,
):
    path = original_layout / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_heads": 24}))
    (problem,) = check_checkpoint(original_layout, "wan2.1_t2v_1.3b", [Request("a car")])
    assert "hf download Wan-AI/Wan2.2-TI2V-5B-Diffusers" in problem
    assert f"--local-dir {original_layout}" in problem


def test_the_original_layout_can_be_used_after_the_download(original_layout, tmp_path):
    for part in ("text_encoder", "vae"):
        shutil.copytree(tmp_path / "diffusers" / part, original_layout / part)
    (problem,) = check_checkpoint(original_layout, None, [Request("a car")])
    assert "for part in tokenizer; do" in problem
    shutil.copytree(tmp_path / "diffusers" / "tokenizer", original_layout / "tokenizer")
    assert check_checkpoint(original_layout, None, [Request("a car")]) == []
    expected = loading.load_transformer(tmp_path / "diffusers", None).state_dict()
    found = loading.load_transformer(original_layout, "wan2.1_t2v_1.3b").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_vae_with_other_channels_is_reported(tmp_path):
    path = write_wan(tmp_path) / "vae" / "config.json"
    settings = json.loads(path.read_text()) | {
        "z_dim": 6,
        "latents_mean": [0.0] * 6,
        "latents_std": [1.0] * 6,
    }
    path.write_text(json.dumps(settings))
    (problem,) = check_checkpoint(tmp_path, None, [Request("a car")], weights_needed=False)
    assert "6 latent channels" in problem
