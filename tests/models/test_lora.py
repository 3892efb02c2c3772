"""Tests that all formats of LoRA files give exactly the same change of the weights."""

import copy
import json
import re

import pytest
import torch
from diffusers.loaders import PeftAdapterMixin
from safetensors.torch import load_file, save_file
from torch import nn

from hyvideo.models.conditions import Condition
from hyvideo.models.family import family_of, install
from hyvideo.models.hunyuan_video15.names import transformer_to_diffusers, transformer_to_original
from hyvideo.models.loading import load_transformer
from hyvideo.models.lora import (
    Difference,
    LoraPair,
    add_lora,
    add_trainable_lora,
    current_lora,
    target_modules,
    training_config,
)
from hyvideo.models.lora_files import read_lora
from hyvideo.models.lora_saving import save_lora
from tests.models.conftest import VERSION

BLOCK = "transformer_blocks.1"
TARGETS = (
    f"{BLOCK}.attn.to_q",
    f"{BLOCK}.attn.add_v_proj",
    f"{BLOCK}.ff.net.2",
    "transformer_blocks.0.attn.to_out.0",
)


def draw(transformer, targets=TARGETS, ranks=(2, 3, 2, 2), alphas=(4.0, 4.0, 1.0, 4.0)):
    generator = torch.Generator().manual_seed(0)
    lora = {}
    for name, rank, alpha in zip(targets, ranks, alphas):
        out, into = transformer.get_submodule(name).weight.shape
        a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, into), (out, rank)))
        lora[name] = LoraPair(a, b, alpha)
    return lora


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name].a, expected[name].a) and torch.equal(
            actual[name].b, expected[name].b
        )
        assert actual[name].alpha == expected[name].alpha


def change_of(pair):
    """Return what a pair adds to its weight."""
    return pair.alpha / pair.rank * pair.b @ pair.a


def assert_same_changes(actual, expected):
    assert actual.keys() == expected.keys()
    for name, pair in actual.items():
        torch.testing.assert_close(change_of(pair), change_of(expected[name]))


def changed_weights(transformer, lora, scale=1.0):
    """Return the state dict with the LoRA's changes added explicitly."""
    state = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    for name, pair in lora.items():
        state[f"{name}.weight"] += scale * pair.alpha / pair.rank * pair.b @ pair.a
    return state


@pytest.fixture
def inputs():
    return {
        "latents": torch.randn(1, 4, 2, 2, 2),
        "timestep": torch.tensor([500.0]),
        "conditions": [Condition(torch.randn(3, 24))],
    }


def test_an_adapter_equals_the_change_of_the_weights_and_can_be_disabled(transformer, inputs):
    scale = 0.5
    lora = draw(transformer)
    install(transformer)
    expected = copy.deepcopy(transformer)
    expected.load_state_dict(changed_weights(transformer, lora, scale))
    with torch.no_grad():
        base, changed = transformer(**inputs), expected(**inputs)
        add_lora(transformer, lora, scale=scale)
        torch.testing.assert_close(transformer(**inputs), changed, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(base, changed, rtol=1e-2)
        transformer.disable_adapters()
        assert torch.equal(transformer(**inputs), base)


def test_diffusers_reads_the_diffusers_format(transformer, inputs, tmp_path):
    lora = draw(transformer)
    twin = copy.deepcopy(transformer)
    save_lora(lora, tmp_path, form="diffusers")
    twin.load_lora_adapter(str(tmp_path), use_safetensors=True, adapter_name="default")
    assert_same(current_lora(twin), lora)


def tree(state):
    """Return a model of linear layers with these weights that reads LoRA files by
    diffusers' code.
    """

    class Tree(nn.Module, PeftAdapterMixin):
        pass

    model = Tree()
    for name, weight in state.items():
        if name.endswith(".weight") and weight.ndim == 2:
            *parents, leaf = name.removesuffix(".weight").split(".")
            module = model
            for parent in parents:
                if parent not in dict(module.named_children()):
                    module.add_module(parent, nn.Module())
                module = module.get_submodule(parent)
            module.add_module(leaf, nn.Linear(weight.shape[1], weight.shape[0], bias=False))
            module.get_submodule(leaf).weight.data.copy_(weight)
    return model


BLOCKS = [f"transformer_blocks.{number}" for number in range(3)]
REFINER = "context_embedder.token_refiner.refiner_blocks.0.attn"


def test_diffusers_loader_reads_the_original_format_with_the_same_result(transformer, tmp_path):
    """Includes modules that the original fuses or reorders.

    The original's programs use the same loader.
    """
    lora = draw(transformer, ranks=(2, 3, 4, 2), alphas=(4.0, 4.0, 1.0, 2.5))
    lora |= draw(transformer, ["norm_out.linear"], [3], [6.0])
    fused = draw(transformer, [f"{REFINER}.to_{part}" for part in "qkv"], [2] * 3, [3.0] * 3)
    shared = fused[f"{REFINER}.to_q"].a
    lora |= {name: LoraPair(shared, pair.b, pair.alpha) for name, pair in fused.items()}
    original = tree(transformer_to_original(transformer.state_dict()))
    save_lora(lora, tmp_path, form="original")
    assert_same_changes(read_lora(tmp_path), lora)
    original.load_lora_adapter(str(tmp_path), prefix=None, use_safetensors=True)
    original.fuse_lora()
    original.unload_lora()
    add_lora(transformer, lora)
    transformer.fuse_lora()
    transformer.unload_lora()
    merged, expected = original.state_dict(), transformer_to_original(transformer.state_dict())
    assert len(merged) > 40 and merged.keys() <= expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_peft_reads_the_peft_format(transformer, tmp_path):
    from peft import PeftModel

    lora = draw(transformer)
    save_lora(lora, tmp_path, form="peft")
    wrapped = PeftModel.from_pretrained(copy.deepcopy(transformer), tmp_path)
    merged = wrapped.merge_and_unload().state_dict()
    for name, tensor in changed_weights(transformer, lora).items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)


def test_files_written_by_diffusers_and_peft_can_be_read(transformer, tmp_path):
    lora = draw(transformer)
    add_lora(transformer, lora)
    transformer.save_lora_adapter(tmp_path / "diffusers")
    assert_same(read_lora(tmp_path / "diffusers"), lora)
    tensors = load_file(tmp_path / "diffusers" / "pytorch_lora_weights.safetensors")
    save_file(
        {f"transformer.{name}": t for name, t in tensors.items()}, tmp_path / "prefixed.safetensors"
    )
    read = read_lora(tmp_path / "prefixed.safetensors")
    assert read.keys() == lora.keys() and all(pair.alpha == pair.rank for pair in read.values())


def test_a_lora_for_the_original_changes_the_original_weights(transformer, tmp_path):
    """Includes modules whose rows the two implementations order differently."""
    original = transformer_to_original(transformer.state_dict())
    modules = {
        "double_blocks.0.img_attn_q": 2,
        "txt_in.individual_token_refiner.blocks.0.self_attn_qkv": 2,
        "final_layer.adaLN_modulation.1": 3,
    }
    tensors, changed = {}, dict(original)
    for module, rank in modules.items():
        out, into = original[f"{module}.weight"].shape
        a, b = torch.randn(rank, into), torch.randn(out, rank)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        changed[f"{module}.weight"] = changed[f"{module}.weight"] + b @ a  # alpha is the rank
    save_file(tensors, tmp_path / "pytorch_lora_weights.safetensors")
    lora = read_lora(tmp_path)
    add_lora(transformer, lora)
    transformer.fuse_lora()
    transformer.unload_lora()
    for name, tensor in transformer_to_diffusers(changed).items():
        torch.testing.assert_close(transformer.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)
    save_lora(lora, tmp_path / "saved", form="original")
    saved = load_file(tmp_path / "saved" / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors.items())


def test_the_original_format_has_names_of_the_original_checkpoint(transformer, tmp_path):
    modules = target_modules(transformer, [family_of(transformer).target_modules])
    lora = draw(transformer, modules, [2] * len(modules), [2.0] * len(modules))
    save_lora(lora, tmp_path, form="original")
    names = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    found = {re.sub(r"\.lora_[AB]", "", name) for name in names}
    assert len(found) == len(modules)
    assert found <= transformer_to_original(transformer.state_dict()).keys()
    assert {"double_blocks.0.img_attn_q.weight", "double_blocks.1.txt_mlp.fc2.weight"} <= found


def test_a_lora_with_underscores_in_place_of_the_originals_dots_is_read(transformer, tmp_path):
    """As in files of kohya's programs, for every linear layer of the original."""
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    rows = {f"{name}.weight": transformer.get_submodule(name).weight for name in names}
    originals = [name.removesuffix(".weight") for name in transformer_to_original(rows)]
    assert len(originals) > 40 and any("token_refiner" in name for name in originals)
    dotted, flat = {}, {}
    for number, name in enumerate(originals):
        out, into = transformer_to_original(rows)[f"{name}.weight"].shape
        a, b, alpha = torch.randn(2, into), torch.randn(out, 2), torch.tensor(float(number + 1))
        dotted |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b, f"{name}.alpha": alpha}
        short = f"lora_unet_{name.replace('.', '_')}"
        flat |= {
            f"{short}.lora_down.weight": a,
            f"{short}.lora_up.weight": b,
            f"{short}.alpha": alpha,
        }
    save_file(dotted, tmp_path / "dotted.safetensors")
    save_file(flat, tmp_path / "flat.safetensors")
    lora = read_lora(tmp_path / "flat.safetensors")
    assert set(lora) == set(names)
    assert_same(lora, read_lora(tmp_path / "dotted.safetensors"))


@pytest.mark.parametrize(
    "targets, expected",
    [
        ([r"transformer_blocks\.\d\.attn\.to_q"], [f"{name}.attn.to_q" for name in BLOCKS]),
        (
            ["img_attn_q", "img_mlp.fc2"],
            [f"{name}.{part}" for name in BLOCKS for part in ("attn.to_q", "ff.net.2")],
        ),
        (["blocks.0.self_attn_qkv"], [f"{REFINER}.to_{part}" for part in "qkv"]),
        # the last block's is not used
        (["txt_attn_proj"], [f"{name}.attn.to_add_out" for name in BLOCKS[:-1]]),
    ],
)
def test_targets_are_names_in_diffusers_or_in_the_original(transformer, targets, expected):
    assert sorted(target_modules(transformer, targets)) == sorted(expected)


def test_the_adapter_of_a_bf16_base_is_float32(transformer):
    """In bf16, small updates would round to nothing."""
    transformer.bfloat16()
    add_trainable_lora(transformer, training_config(transformer, rank=2, alpha=2, targets=TARGETS))
    trained = {name: p.dtype for name, p in transformer.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(TARGETS) and set(trained.values()) == {torch.float32}
    assert {p.dtype for name, p in transformer.named_parameters() if name not in trained} == {
        torch.bfloat16
    }


def test_a_lora_is_added_before_the_weights_are_rounded(root, transformer):
    """Added to bf16 weights, a small LoRA would be lost in rounding."""
    lora = draw(transformer)
    lora = {name: LoraPair(pair.a, 1e-4 * pair.b, pair.alpha) for name, pair in lora.items()}
    expected = changed_weights(transformer, lora)
    loaded = load_transformer(root, VERSION, dtype=torch.bfloat16, loras=[lora]).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, expected[name].bfloat16(), rtol=0, atol=0)


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t.pop(f"transformer.{BLOCK}.attn.to_q.lora_B.weight"), "to_q"),
        (lambda t: t.update({f"{BLOCK}.attn.to_q.weight": torch.zeros(64, 64)}), "to_q.weight"),
    ],
)
def test_an_incomplete_lora_raises_an_error_with_the_tensor(transformer, tmp_path, change, named):
    save_lora(draw(transformer), tmp_path)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=named):
        read_lora(tmp_path)


def test_a_lora_for_another_model_leaves_the_transformer_unchanged(transformer):
    lora = draw(transformer) | {
        "transformer_blocks.77.attn.to_q": LoraPair(torch.zeros(1, 64), torch.zeros(64, 1), 1.0)
    }
    lora[TARGETS[0]] = LoraPair(torch.zeros(1, 32), torch.zeros(32, 1), 1.0)
    with pytest.raises(
        ValueError,
        match=f"(?s){TARGETS[0]}.*transformer_blocks.77.attn.to_q",
    ):
        add_lora(transformer, lora)
    assert not hasattr(transformer, "peft_config")


def test_lora_variants_raise_an_error(transformer, tmp_path):
    save_lora(draw(transformer), tmp_path, form="peft")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="use_dora"):
        read_lora(tmp_path)


def test_a_target_without_a_match_raises_an_error(transformer):
    with pytest.raises(ValueError, match="img_atn_q"):
        training_config(transformer, rank=2, alpha=2, targets=[r".*\.to_q", "img_atn_q"])


@pytest.mark.parametrize(
    "change, setting",
    [
        ({"rank": 3}, "lora_rank"),
        ({"alpha": 2.0}, "lora_alpha"),
    ],
)
def test_an_adapter_to_start_from_must_match_the_settings(transformer, change, setting):
    lora = draw(transformer, ranks=(2,) * 4, alphas=(4.0,) * 4)
    settings = {"rank": 2, "alpha": 4.0, "start": lora}
    training_config(transformer, **settings)
    with pytest.raises(ValueError, match=setting):
        training_config(transformer, **settings | change)


def test_weights_that_are_not_finite_numbers_raise_an_error(tmp_path):
    tensors = {
        f"transformer.{BLOCK}.attn.to_q.lora_A.weight": torch.full((2, 8), float("nan")),
        f"transformer.{BLOCK}.attn.to_q.lora_B.weight": torch.zeros(8, 2),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=r"lora\.safetensors.*to_q|to_q.*lora\.safetensors"):
        read_lora(tmp_path / "lora.safetensors")


def test_a_fused_difference_of_which_a_part_is_zero_is_saved_and_exported(tmp_path):
    """A bias of keys has no gradient, so that its difference is zero."""
    attention = "context_embedder.token_refiner.refiner_blocks.0.attn.to_"
    lora = {"transformer_blocks.0.attn.to_out.0": LoraPair(torch.ones(4, 8), torch.ones(8, 4), 4.0)}
    for part in "qkv":
        lora[f"{attention}{part}.bias"] = Difference(torch.full((8,), float(part != "k")))
    save_lora(lora, tmp_path / "original", form="original")
    read = read_lora(tmp_path / "original")
    save_lora(read, tmp_path / "checkpoint")
    again = read_lora(tmp_path / "checkpoint")
    assert again.keys() == read.keys() == lora.keys()
    save_lora(again, tmp_path / "exported", form="original")
    assert read_lora(tmp_path / "exported").keys() == lora.keys()


def comfyui_layers(transformer):
    """Return the names of the linear layers of ComfyUI's HunyuanVideo-1.5, and of the diffusers layers
    whose rows each has.
    """
    layers = {
        "final_layer.adaLN_modulation.1": ["norm_out.linear"],
        "final_layer.linear": ["proj_out"],
        "txt_in.input_embedder": ["context_embedder.proj_in"],
    }
    time = "context_embedder.time_text_embed"
    for i, part in enumerate(("in_layer", "out_layer"), start=1):
        layers[f"time_in.{part}"] = [f"time_embed.timestep_embedder.linear_{i}"]
        layers[f"txt_in.t_embedder.{part}"] = [f"{time}.timestep_embedder.linear_{i}"]
        layers[f"txt_in.c_embedder.{part}"] = [f"{time}.text_embedder.linear_{i}"]
    for i in (1, 2, 3):
        layers[f"byt5_in.fc{i}"] = [f"context_embedder_2.linear_{i}"]
    for i, part in ((1, 1), (3, 2)):
        layers[f"vision_in.proj.{i}"] = [f"image_embedder.linear_{part}"]
    for i in range(transformer.config.num_refiner_layers):
        here = f"context_embedder.token_refiner.refiner_blocks.{i}"
        there = f"txt_in.individual_token_refiner.blocks.{i}"
        layers[f"{there}.self_attn.qkv"] = [f"{here}.attn.to_{part}" for part in "qkv"]
        layers[f"{there}.self_attn.proj"] = [f"{here}.attn.to_out.0"]
        layers[f"{there}.mlp.0"] = [f"{here}.ff.net.0.proj"]
        layers[f"{there}.mlp.2"] = [f"{here}.ff.net.2"]
        layers[f"{there}.adaLN_modulation.1"] = [f"{here}.norm_out.linear"]
    for i in range(transformer.config.num_layers):
        here, there = f"transformer_blocks.{i}", f"double_blocks.{i}"
        layers[f"{there}.img_attn.qkv"] = [f"{here}.attn.to_{part}" for part in "qkv"]
        layers[f"{there}.txt_attn.qkv"] = [f"{here}.attn.add_{part}_proj" for part in "qkv"]
        layers[f"{there}.img_attn.proj"] = [f"{here}.attn.to_out.0"]
        layers[f"{there}.txt_attn.proj"] = [f"{here}.attn.to_add_out"]
        for stream, feed_forward in (("img", "ff"), ("txt", "ff_context")):
            norm = "norm1" if stream == "img" else "norm1_context"
            layers[f"{there}.{stream}_mod.lin"] = [f"{here}.{norm}.linear"]
            layers[f"{there}.{stream}_mlp.0"] = [f"{here}.{feed_forward}.net.0.proj"]
            layers[f"{there}.{stream}_mlp.2"] = [f"{here}.{feed_forward}.net.2"]
    return layers


def changes_by_comfyui(folder, layers):
    """Return what a program adds to the weights of its layers that reads a file as ComfyUI does: by
    names with diffusion_model., scaled by alpha / rank, where alpha is a tensor or the rank.
    """
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    changes = {}
    for layer in layers:
        a = tensors.pop(f"diffusion_model.{layer}.lora_A.weight", None)
        if a is not None:
            b = tensors.pop(f"diffusion_model.{layer}.lora_B.weight")
            alpha = float(tensors.pop(f"diffusion_model.{layer}.alpha", len(a)))
            changes[layer] = alpha / len(a) * b @ a
    assert not tensors  # ComfyUI would ignore them
    return changes


@pytest.mark.parametrize("alphas", [{4.0}, {4.0, 1.0}])
@pytest.mark.parametrize("targets", ["blocks", "all", "some"])
def test_a_file_for_comfyui_changes_its_weights_equally(transformer, tmp_path, targets, alphas):
    """ComfyUI's model has one layer for queries, keys and values."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    names = {
        "blocks": target_modules(transformer, [family_of(transformer).target_modules]),
        "all": linear,
        "some": [f"{BLOCK}.attn.to_q", f"{BLOCK}.attn.to_v", f"{BLOCK}.attn.add_k_proj"],
    }[targets]
    alphas = sorted(alphas) * len(names)
    ranks = [2, 3, 1] * len(names) if len(set(alphas)) > 1 else [2] * len(names)
    lora = draw(transformer, names, ranks, alphas)
    save_lora(lora, tmp_path, form="comfyui")

    layers = comfyui_layers(transformer)
    assert {name for parts in layers.values() for name in parts} >= set(names)
    changes = changes_by_comfyui(tmp_path, layers)
    differences = {name: pair.alpha / pair.rank * pair.b @ pair.a for name, pair in lora.items()}
    for layer, parts in layers.items():
        if not set(parts) & set(names):
            assert layer not in changes
            continue
        weights = [transformer.get_submodule(part).weight for part in parts]
        expected = torch.cat(
            [
                differences.get(part, torch.zeros_like(weight))
                for part, weight in zip(parts, weights)
            ]
        )
        if layer == "final_layer.adaLN_modulation.1":  # (shift, scale), in diffusers (scale, shift)
            expected = torch.cat(expected.chunk(2)[::-1])
        torch.testing.assert_close(changes[layer], expected)

    again = read_lora(tmp_path)
    assert again.keys() >= lora.keys()
    for name, pair in again.items():
        change = pair.alpha / pair.rank * pair.b @ pair.a
        expected = differences.get(name, torch.zeros_like(change))
        torch.testing.assert_close(change, expected)
