"""Weight files as people bring them are read in the meaning of their writer, or refused by name.

Every case holds for the transformer, the VAE and the text encoder: one reader serves them. The
witnesses are ComfyUI's and vLLM's fp8 files, state dicts saved from DDP, FSDP and compiled models,
repositories that became sharded, and files of transformers 5.0.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyvideo.models.encoders import _check_vocabulary
from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.wan.encoders import load_text_encoder
from tests.tiny_wan import write_wan

STEMS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
}
LOAD = {
    "transformer": lambda root: load_transformer(root, None),
    "vae": load_vae,
    "text_encoder": lambda root: load_text_encoder(root)[1],
}
components = pytest.mark.parametrize("part", STEMS)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture
def root(original, tmp_path):
    return shutil.copytree(original, tmp_path / "wan")


def path_of(root, part):
    return root / part / f"{STEMS[part]}.safetensors"


def rewrite(root, part, change):
    """Replace the tensors of a component's file by what ``change`` makes of them."""
    path = path_of(root, part)
    save_file(change(load_file(path)), path)


def state_of(root, part):
    return {name: tensor.clone() for name, tensor in LOAD[part](root).state_dict().items()}


def difference(first, second):
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def in_8_bits(tensors, scale_name, per_row):
    """Return the tensors with matrices in fp8 and their scales."""
    changed = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not name.endswith(".weight"):
            changed[name] = tensor
            continue
        largest = tensor.abs().amax(dim=1, keepdim=True) if per_row else tensor.abs().max()
        scale = (largest / 448).clamp(min=1e-12)
        changed[name] = (tensor / scale).to(torch.float8_e4m3fn)
        changed[name.removesuffix("weight") + scale_name] = scale
        changed[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.3)
    return changed


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
@pytest.mark.parametrize(
    "scale_name, per_row",
    [("scale_weight", False), ("weight_scale", False), ("weight_scale", True)],
)
def test_fp8_weights_are_multiplied_by_their_scales(root, part, scale_name, per_row):
    exact = state_of(root, part)
    rewrite(root, part, lambda tensors: in_8_bits(tensors, scale_name, per_row))
    scaled = load_file(path_of(root, part))
    stored = next(
        name for name in scaled if scaled[name].dtype == torch.float8_e4m3fn and "." in name
    )
    assert scaled[stored].float().abs().max() > 100  # the scales matter
    loaded = state_of(root, part)
    for name, tensor in exact.items():
        error = (loaded[name] - tensor).abs().max().item()
        assert error <= 0.07 * tensor.abs().max().item(), name  # fp8 has 3 bits of mantissa


@components
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_8_bit_weights_without_scales_are_refused(root, part, dtype):
    changed = next(name for name, t in load_file(path_of(root, part)).items() if t.ndim > 1)
    rewrite(root, part, lambda tensors: tensors | {changed: tensors[changed].to(dtype)})
    with pytest.raises(ValueError, match=f"{changed}.*dtype"):
        LOAD[part](root)


@components
def test_a_scale_that_does_not_fit_is_refused(root, part):
    """mxfp8 has a scale for every 32 numbers."""

    def change(tensors):
        name = next(
            name for name, tensor in tensors.items() if tensor.ndim > 1 and ".weight" in name
        )
        blocks = torch.ones(tensors[name].shape[0], 2)
        eight_bits = {name: tensors[name].to(torch.float8_e4m3fn)}
        return tensors | eight_bits | {name.removesuffix("weight") + "weight_scale": blocks}

    rewrite(root, part, change)
    with pytest.raises(ValueError, match="weight_scale"):
        LOAD[part](root)


@components
def test_a_tensor_that_the_model_does_not_read_is_refused(root, part):
    rewrite(root, part, lambda tensors: tensors | {"blocks.0.controlnet.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="controlnet"):
        LOAD[part](root)


def test_the_decoder_of_a_whole_t5_and_computed_buffers_are_left_out(root):
    exact = state_of(root, "text_encoder")
    others = {"lm_head.weight": torch.ones(2, 2), "decoder.final_layer_norm.weight": torch.ones(2)}
    others |= {"encoder.rotary_emb.inv_freq": torch.ones(2)}
    rewrite(root, "text_encoder", lambda tensors: tensors | others)
    assert difference(state_of(root, "text_encoder"), exact) == 0


@components
@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace(".0.", ".0._fsdp_wrapped_module._checkpoint_wrapped_module."),
    ],
)
def test_names_of_wrappers_are_removed(root, part, wrap):
    exact = state_of(root, part)
    names = load_file(path_of(root, part))
    assert any(wrap(name) != name for name in names)
    rewrite(root, part, lambda tensors: {wrap(name): t for name, t in tensors.items()})
    assert difference(state_of(root, part), exact) == 0


@components
def test_two_values_of_one_tensor_are_refused_and_equal_ones_are_read(root, part):
    exact = state_of(root, part)
    name = next(iter(load_file(path_of(root, part))))
    rewrite(root, part, lambda tensors: tensors | {f"module.{name}": tensors[name].clone()})
    assert difference(state_of(root, part), exact) == 0
    rewrite(root, part, lambda tensors: tensors | {f"module.{name}": tensors[name] + 1})
    with pytest.raises(ValueError, match=rf"module\.{name}"):
        LOAD[part](root)


def test_the_two_tables_of_umt5_must_be_equal(root):
    """transformers 5.0 wrote zeros as the second one."""
    table = load_file(path_of(root, "text_encoder"))["shared.weight"]
    exact = state_of(root, "text_encoder")
    second = "encoder.embed_tokens.weight"
    rewrite(root, "text_encoder", lambda tensors: tensors | {second: table.clone()})
    assert difference(state_of(root, "text_encoder"), exact) == 0
    rewrite(root, "text_encoder", lambda tensors: tensors | {second: torch.zeros_like(table)})
    with pytest.raises(ValueError, match="shared.weight"):
        LOAD["text_encoder"](root)


@pytest.mark.parametrize(
    "part, name",
    [("text_encoder", "shared.weight"), ("transformer", "patch_embedding.weight")],
)
def test_an_embedding_of_zeros_is_refused(root, part, name):
    assert load_file(path_of(root, part))[name].any()
    rewrite(root, part, lambda tensors: tensors | {name: torch.zeros_like(tensors[name])})
    with pytest.raises(ValueError, match=f"{name}.*embedding"):
        LOAD[part](root)


def split(root, part, *, with_index):
    """Replace a file by two parts, with other names as diffusers writes them."""
    path = path_of(root, part)
    tensors = load_file(path)
    names = sorted(tensors)
    halves = {
        f"{STEMS[part]}-0000{number}-of-00002.safetensors": names[number - 1 :: 2]
        for number in (1, 2)
    }
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, path.with_name(file))
    if with_index:
        weight_map = {name: file for file, half in halves.items() for name in half}
        index = path.with_name(f"{path.name}.index.json")
        index.write_text(json.dumps({"weight_map": weight_map}))


@components
@pytest.mark.parametrize("with_index", [True, False])
def test_parts_are_read_with_and_without_an_index_but_not_beside_a_whole_file(
    root, part, with_index
):
    exact = state_of(root, part)
    split(root, part, with_index=with_index)
    with pytest.raises(ValueError, match="delete"):
        LOAD[part](root)
    path_of(root, part).unlink()
    assert difference(state_of(root, part), exact) == 0
    missing = f"{STEMS[part]}-00002-of-00002.safetensors"
    (root / part / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        LOAD[part](root)


@components
def test_an_index_of_the_whole_file_or_of_parts_that_are_gone_changes_nothing(root, part):
    exact = state_of(root, part)
    path = path_of(root, part)
    for file in (path.name, "gone.safetensors"):
        index = path.with_name(f"{path.name}.index.json")
        index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(path), file)}))
        assert difference(state_of(root, part), exact) == 0


@components
@pytest.mark.parametrize("ending", ["fp16.safetensors", "bin"])
def test_what_lies_in_place_of_a_missing_file_is_listed(root, part, ending):
    path = path_of(root, part)
    other = f"{STEMS[part]}.{ending}"
    path.rename(path.with_name(other))
    with pytest.raises(ValueError, match=f"{path.name}.*{other}"):
        LOAD[part](root)


@pytest.mark.parametrize(
    "num_tokens, num_rows",
    [(256_300, 256_384), (151_665, 152_064), (259, 384), (384, 384), (32_100, 32_128), (90, 90)],
)
def test_the_tokenizers_of_released_encoders_fit(num_tokens, num_rows):
    _check_vocabulary(num_tokens, num_rows)


@pytest.mark.parametrize(
    "num_tokens, num_rows",
    [(32_100, 256_384), (128_150, 256_384), (45, 90), (91, 90), (384, 259)],
)
def test_a_tokenizer_of_another_model_is_refused(num_tokens, num_rows):
    with pytest.raises(ValueError, match=f"{num_rows:,}"):
        _check_vocabulary(num_tokens, num_rows)
