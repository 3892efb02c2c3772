"""Tests of LoRA on Wan: ten layers per block, all file formats, and no mixing with other
families.
"""

from dataclasses import replace
from typing import get_args
from zlib import crc32

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from hyvideo.models.lora import (
    LoraPair,
    add_lora,
    differences_of,
    fit_lora,
    pairs_of,
    target_modules,
)
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import Form, save_lora
from tests.models.test_lora import assert_same
from tests.models.wan.tiny import FAMILY, inputs, installed, tiny

FILE = "pytorch_lora_weights.safetensors"


def draw(model, alpha=4.0, rank=2, names=None):
    generator = torch.Generator().manual_seed(0)
    lora = {}
    for name in names or target_modules(model, [FAMILY.target_modules]):
        out, into = model.get_submodule(name).weight.shape
        lora[name] = LoraPair(
            torch.randn(rank, into, generator=generator),
            torch.randn(out, rank, generator=generator),
            alpha,
        )
    return lora


@pytest.mark.parametrize("alpha", [3.0, 4.0])
def test_diffusers_reads_the_original_format_of_every_linear_layer(tmp_path, alpha):
    """Alpha is part of B, because diffusers reads none outside the blocks, FastVideo none at all; that is
    exact if alpha / rank is a power of 2.
    """
    model = tiny()
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    outside = [name for name in names if not name.startswith("blocks.")]
    assert len(outside) == 6
    lora = draw(model, alpha, names=names)
    save_lora(lora, tmp_path, form="original")
    read = WanPipeline.lora_state_dict(str(tmp_path), weight_name=FILE, use_safetensors=True)
    assert read.keys() == {
        f"transformer.{name}.lora_{side}.weight" for name in names for side in "AB"
    }
    ours = read_lora(tmp_path)
    for name, pair in lora.items():
        expected = pair.alpha / pair.rank * pair.b @ pair.a
        found = (
            read[f"transformer.{name}.lora_B.weight"] @ read[f"transformer.{name}.lora_A.weight"]
        )
        torch.testing.assert_close(found, expected)
        again = ours[name]
        assert torch.equal(again.a, pair.a) and again.alpha == again.rank == 2
        torch.testing.assert_close(again.alpha / again.rank * again.b @ again.a, expected)
        if alpha == 4.0:
            assert torch.equal(again.b * (again.alpha / pair.alpha), pair.b)


def test_the_original_format_has_the_names_by_which_comfyui_finds_layers(tmp_path):
    """It looks for `diffusion_model.` and the name of a layer in the original checkpoint."""
    model = tiny()
    save_lora(draw(model), tmp_path, form="original")
    modules = {
        name.removesuffix(end)
        for name in load_file(tmp_path / FILE)
        for end in (".lora_A.weight", ".lora_B.weight", ".alpha")
        if name.endswith(end)
    }
    layers = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    blocks = range(model.config.num_layers)
    assert modules == {
        f"diffusion_model.blocks.{i}.{layer}"
        for i in blocks
        for layer in (*layers, "ffn.0", "ffn.2")
    }
    original = FAMILY.transformer.to_original(model.state_dict())
    assert {
        f"{name.removeprefix('diffusion_model.')}.weight" for name in modules
    } <= original.keys()


def kohya_file(path, lora, prefix="lora_unet_", metadata=None, with_alpha=True):
    """Write a LoRA with the names of kohya's programs: the original's, with underscores."""
    plain = {name: replace(pair, alpha=float(pair.rank)) for name, pair in lora.items()}
    save_lora(plain, path.parent / "dotted", form="original")
    tensors = {}
    for name, tensor in load_file(path.parent / "dotted" / FILE).items():
        module, _, side = name.removeprefix("diffusion_model.").partition(".lora_")
        end = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}[side]
        flat = prefix + module.replace(".", "_")
        tensors[f"{flat}.{end}"] = tensor
        if with_alpha:
            (alpha,) = {pair.alpha for pair in lora.values()}
            tensors[f"{flat}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path, metadata=metadata)
    return tensors


def test_a_file_of_musubi_tuner_is_read_as_by_diffusers(tmp_path):
    lora = draw(tiny(), alpha=3.0)
    tensors = kohya_file(tmp_path / "kohya.safetensors", lora)
    assert (
        "lora_unet_blocks_0_self_attn_q.lora_down.weight" in tensors
        and "lora_unet_blocks_1_ffn_2.alpha" in tensors
    )
    assert_same(read_lora(tmp_path / "kohya.safetensors"), lora)
    read = WanPipeline.lora_state_dict(
        str(tmp_path), weight_name="kohya.safetensors", use_safetensors=True
    )
    for name, pair in lora.items():
        found = (
            read[f"transformer.{name}.lora_B.weight"] @ read[f"transformer.{name}.lora_A.weight"]
        )
        torch.testing.assert_close(found, pair.alpha / pair.rank * pair.b @ pair.a)


def test_an_unknown_name_of_kohyas_format_raises_an_error(tmp_path):
    module = "blocks_0_self_attn_what"
    sides = {f"lora_unet_{module}.lora_{side}.weight": torch.ones(2, 2) for side in ("down", "up")}
    save_file(sides, tmp_path / "kohya.safetensors")
    with pytest.raises(ValueError, match=f"lora_unet_{module}"):
        read_lora(tmp_path / "kohya.safetensors")


BLOCK_LAYERS = [f"{kind}_attn.{layer}" for kind in ("self", "cross") for layer in "qkvo"]
BLOCK_LAYERS += ["ffn.0", "ffn.2"]
BLOCK_NORMS = [f"{kind}_attn.norm_{layer}" for kind in ("self", "cross") for layer in "qk"]
OTHER_LAYERS = [f"{kind}_embedding.{number}" for kind in ("text", "time") for number in (0, 2)]
OTHER_LAYERS += ["time_projection.1", "head.head"]
ENDINGS = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation"}


def lightx2v_file(path, model, scale=0.1):
    """Write a file with the names of lightx2v's LoRAs: pairs of all linear layers and differences of
    all other parameters. Return the original's weights with these changes.
    """
    weights = FAMILY.transformer.to_original(model.state_dict())
    # files of other names have other contents
    generator = torch.Generator().manual_seed(crc32(path.name.encode()))
    layers = [f"blocks.{number}.{layer}" for number in (0, 1) for layer in BLOCK_LAYERS]
    layers += OTHER_LAYERS
    norms = [f"blocks.{number}.{norm}" for number in (0, 1) for norm in BLOCK_NORMS]
    changed = [f"{layer}.diff_b" for layer in layers] + [f"{norm}.diff" for norm in norms]
    changed += [f"blocks.{number}.norm3.{end}" for number in (0, 1) for end in ("diff", "diff_b")]
    changed += ["patch_embedding.diff", "patch_embedding.diff_b"]
    changed += ["blocks.0.diff_m", "blocks.1.diff_m", "head.diff_m"]
    tensors, expected = {}, dict(weights)
    for layer in layers:
        out, into = weights[f"{layer}.weight"].shape
        down = torch.randn(2, into, generator=generator)
        up = scale * torch.randn(out, 2, generator=generator)
        tensors |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
        expected[f"{layer}.weight"] = expected[f"{layer}.weight"] + up @ down
    for name in changed:
        module, _, ending = name.rpartition(".")
        parameter = f"{module}.{ENDINGS[ending]}"
        tensors[name] = scale * torch.randn(weights[parameter].shape, generator=generator)
        expected[parameter] = expected[parameter] + tensors[name]
    save_file({f"diffusion_model.{name}": tensor for name, tensor in tensors.items()}, path)
    assert all(not torch.equal(expected[name], weights[name]) for name in weights)
    return expected


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_added_lightx2v_file_has_the_velocity_of_the_merged_weights(tmp_path, scale):
    """``lora_scale`` scales the pairs and the differences."""
    added, merged = installed(), installed()
    expected = lightx2v_file(tmp_path / "lora.safetensors", added)
    original = FAMILY.transformer.to_original(merged.state_dict())
    scaled = {name: torch.lerp(original[name], expected[name], scale) for name in original}
    merged.load_state_dict(FAMILY.transformer.to_diffusers(scaled))
    add_lora(added, read_lora(tmp_path / "lora.safetensors"), scale=scale)
    with torch.no_grad():
        torch.testing.assert_close(added(**inputs()), merged(**inputs()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", get_args(Form))
def test_differences_round_trip_bit_for_bit(tmp_path, form):
    lightx2v_file(tmp_path / "lora.safetensors", tiny())
    lora = read_lora(tmp_path / "lora.safetensors")
    save_lora(lora, tmp_path / form, form=form)
    again = read_lora(tmp_path / form)
    assert_same(pairs_of(again), pairs_of(lora))
    differences = differences_of(lora)
    assert len(differences) == 26 + 8 + 4 + 2 + 3 and differences_of(again).keys() == set(
        differences
    )
    for name, difference in differences_of(again).items():
        assert torch.equal(difference.tensor, differences[name].tensor)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"blocks.0.norm3.diff": torch.ones(5)}, "blocks.0.norm2.weight"),
        ({"blocks.0.norm3.diff": torch.full((72,), torch.nan)}, "blocks.0.norm3.diff"),
    ],
)
def test_a_difference_that_does_not_fit_is_an_error(tmp_path, change, message):
    lightx2v_file(tmp_path / "lora.safetensors", tiny())
    tensors = load_file(tmp_path / "lora.safetensors")
    changed = {f"diffusion_model.{name}": tensor for name, tensor in change.items()}
    save_file(tensors | changed, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=message):
        fit_lora(tiny(), read_lora(tmp_path / "other.safetensors"))


@pytest.mark.parametrize(
    "sides, alpha", [(("lora_A", "lora_B"), None), (("lora_down", "lora_up"), 1.0)]
)
def test_files_of_comfyui_and_diffsynth_are_read(tmp_path, sides, alpha):
    lora = draw(tiny(), alpha=alpha or 2.0, names=["blocks.1.attn2.to_out.0"])
    pair = lora["blocks.1.attn2.to_out.0"]
    module = "diffusion_model.blocks.1.cross_attn.o"
    tensors = {f"{module}.{side}.weight": tensor for side, tensor in zip(sides, (pair.a, pair.b))}
    if alpha:
        tensors[f"{module}.alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "any_name.safetensors")
    assert_same(read_lora(tmp_path / "any_name.safetensors"), lora)
