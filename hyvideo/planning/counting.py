"""Counts on models without weights, for models that the table of `flops` lacks, and that table.

Parameters are counted on the meta device. FLOPs are counted by torch's ``FlopCounterMode`` in the
forward pass of this project on fake tensors, with one and with two blocks, and extrapolated to all
blocks. Any family can be counted, because nothing here knows its layers.

    python -m hyvideo.planning.counting      writes the table anew, in a few minutes
"""

import functools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import sympy  # needed by torch
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.files.files import ROOT
from hyvideo.models.conditions import Condition, ImageCondition
from hyvideo.models.family import Component, family_named, new_model
from hyvideo.models.lora import target_modules
from hyvideo.models.registry import package_name
from hyvideo.models.sizes import Sizes, read_architecture, released_sizes
from hyvideo.models.versions import RELEASED, UNSUPPORTED
from hyvideo.planning.flops import (
    TABLE,
    Flops,
    Parameters,
    decoding_key,
    forward_key,
    parameters_key,
    with_blocks,
)
from hyvideo.settings.command_line import load_config

# (image tokens by axis, text tokens) from which the six coefficients of a polynomial follow
POINTS = (
    ((1, 2, 2), 1),
    ((1, 2, 2), 2),
    ((1, 2, 2), 3),
    ((1, 2, 4), 1),
    ((1, 4, 4), 1),
    ((1, 2, 4), 2),
)


def count_parameters(sizes: Sizes, lora_targets: tuple[str, ...] = ()) -> Parameters:
    """Return the parameters of a model, and of a LoRA on ``lora_targets`` or all matrices."""
    return _count_parameters(sizes.family, _key(sizes.transformer), _key(sizes.vae), lora_targets)


def flops_of_latents(sizes: Sizes, grid: tuple[int, int, int], text_tokens: int) -> Flops:
    """Return the FLOPs of a forward pass for latents (frames, height, width) and a prompt."""
    return with_blocks(*_flops_of_blocks(sizes, grid, text_tokens), sizes.num_layers)


def _flops_of_blocks(
    sizes: Sizes, grid: tuple[int, int, int], text_tokens: int
) -> tuple[Flops, Flops]:
    """Return the FLOPs of a forward pass with one block, and of each further block."""
    shape = (sizes.out_channels, *grid)
    text = (text_tokens, sizes.text_width)
    transformer = _key(sizes.transformer)
    one_block = _forward_flops(sizes.family, transformer, shape, text, num_layers=1)
    two_blocks = _forward_flops(sizes.family, transformer, shape, text, num_layers=2)
    further_block = Flops(
        products=two_blocks.products - one_block.products,
        attention=two_blocks.attention - one_block.attention,
    )
    return one_block, further_block


def count_decoding(sizes: Sizes) -> float:
    """Return the FLOPs of decoding per pixel and frame."""
    return _decode_flops(
        sizes.family,
        _key(sizes.vae),
        sizes.out_channels,
        sizes.temporal_compression_ratio,
        sizes.spatial_compression_ratio,
    )


def listed_models() -> dict[str, tuple[Sizes, tuple[str, ...]]]:
    """Return the released versions and the models of the shipped configs, with their LoRA
    targets.
    """
    models: dict[str, tuple[Sizes, tuple[str, ...]]] = {
        version: (released_sizes(version), ()) for version in RELEASED if version not in UNSUPPORTED
    }
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = load_config(str(path))
        sizes = read_architecture(
            config.model.pretrained_model_root, config.model.transformer_version
        )
        models[f"{path.stem}, all matrices"] = (sizes, ())
        models[path.stem] = (sizes, tuple(config.optimizer.lora_target_modules))
    return models


def table_of(models: Mapping[str, tuple[Sizes, tuple[str, ...]]]) -> dict[str, dict[str, Any]]:
    """Return the table of `flops` for models and their LoRA targets, by a name for readers."""
    table: dict[str, dict[str, Any]] = {"parameters": {}, "forward": {}, "decoding": {}}
    for name, (sizes, targets) in models.items():
        key = parameters_key(sizes, targets)
        if key not in table["parameters"]:
            table["parameters"][key] = asdict(count_parameters(sizes, targets))
        if forward_key(sizes) not in table["forward"]:
            table["forward"][forward_key(sizes)] = {"name": name} | _polynomials(sizes)
        if decoding_key(sizes) not in table["decoding"]:
            table["decoding"][decoding_key(sizes)] = {
                "name": name,
                "per_pixel": count_decoding(sizes),
            }
    return table


def _polynomials(sizes: Sizes) -> dict[str, dict[str, list[int]]]:
    """Return the coefficients of `flops.polynomial` for products and attention of one block with
    the layers around the blocks, and of each further block.
    """
    rows, counted = [], []
    for grid, text in POINTS:
        image = math.prod(grid)
        rows.append([1, image, text, image * image, image * text, text * text])
        latents = tuple(side * patch for side, patch in zip(grid, sizes.patch))
        counted.append(_flops_of_blocks(sizes, latents, text))
    return {
        part: {
            "products": _solved(rows, [flops.products for flops in found]),
            "attention": _solved(rows, [flops.attention for flops in found]),
        }
        for part, found in zip(("one_block", "further_block"), zip(*counted))
    }


def _solved(rows: list[list[int]], values: list[int]) -> list[int]:
    """Return the whole numbers x with ``rows x = values``."""
    solution = list(sympy.Matrix(rows).LUsolve(sympy.Matrix(values)))
    assert all(value.is_integer for value in solution), "FLOPs are no polynomial of tokens"
    return [int(value) for value in solution]


@contextmanager
def fake_tensors(family_name: str) -> Iterator[None]:
    """Context manager in which tensors have no memory, and after which no cached function of the
    family keeps one: a forward pass with a fake rotary table would return memory that nobody wrote.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        package = package_name(family_name)
        for name, module in list(sys.modules.items()):
            if name == package or name.startswith(f"{package}."):
                for value in list(vars(module).values()):
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()


def _key(config: Mapping[str, Any]) -> str:
    """Return the arguments of a model's class as a text, for `functools.cache`."""
    return json.dumps(dict(config), sort_keys=True)


def _build(family_name: str, transformer: str, **changes: Any) -> nn.Module:
    """Return the transformer with this project's forward pass, on the default device."""
    config = json.loads(transformer) | changes
    family = family_named(family_name)
    model = _model(family.transformer_of(config["_class_name"]), config)
    family.install(model)
    return model.requires_grad_(False)


def _model(component: Component, config: Mapping[str, Any]) -> nn.Module:
    arguments = {name: value for name, value in config.items() if not name.startswith("_")}
    return new_model(component, arguments)


@functools.cache
def _count_parameters(
    family_name: str, transformer: str, vae: str, lora_targets: tuple[str, ...]
) -> Parameters:
    family = family_named(family_name)
    with torch.device("meta"):
        model = _build(family_name, transformer)
        vae_model = _model(family.vae, json.loads(vae))
    blocks = model.get_submodule(family.blocks)
    matrices = []
    modulations = []
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or not name.startswith(family.blocks):
            continue
        if re.fullmatch(family.target_modules, name):
            matrices.append(layer.weight.numel())
        else:
            modulations.append(_number(layer))
    layers = []
    if matrices or lora_targets:
        adapted = target_modules(model, lora_targets or [family.target_modules])
        layers = [model.get_submodule(name) for name in adapted]
    return Parameters(
        total=_number(model),
        block=_number(blocks[0]),
        matrices=sum(matrices),
        largest_matrix=max(matrices, default=0),
        modulation=sum(modulations),
        num_modulations=len(modulations),
        per_lora_rank=sum(layer.in_features + layer.out_features for layer in layers),
        vae=_number(vae_model),
        is_flow_map=model.is_flow_map,
        num_blocks=len(blocks),
    )


def _number(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@functools.cache
def _forward_flops(
    family_name: str,
    transformer: str,
    shape: tuple[int, ...],
    text: tuple[int, int],
    num_layers: int,
) -> Flops:
    """Return the FLOPs of a forward pass with ``num_layers`` blocks."""
    with fake_tensors(family_name), torch.no_grad():
        model = _build(family_name, transformer, num_layers=num_layers)
        latents = torch.empty(1, *shape)
        needs_image = family_named(family_name).task(model.config, {}) == "i2v"
        image = None
        if needs_image:
            config = model.config
            features = None
            if config.get("image_dim"):
                features = torch.empty(config.pos_embed_seq_len or 257, config.image_dim)
            # those that the transformer reads beside the noisy ones
            channels = max(config.get("in_channels", 0) - shape[0], 0) or shape[0]
            image = ImageCondition(features, torch.empty(channels, *shape[1:]))
        condition = Condition(torch.empty(*text) if text[1] else None, image=image)
        timestep = torch.full((1,), 500.0)
        ends = timestep if model.is_flow_map else None
        # Only this implementation of attention consists of operators that the counter knows on a
        # CPU. It computes attention by batched products, which nothing else uses.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(latents, timestep=timestep, conditions=[condition], ends=ends)
    counts = counter.get_flop_counts()["Global"]
    attention = counts.get(torch.ops.aten.bmm, 0)
    return Flops(products=counter.get_total_flops() - attention, attention=attention)


@functools.cache
def _decode_flops(
    family_name: str, vae: str, channels: int, frames_ratio: int, side_ratio: int
) -> float:
    """Return the FLOPs of decoding per pixel and frame, in a tile of 256 pixels: what a third latent
    frame adds to two.
    """
    family = family_named(family_name)
    side = 256 // side_ratio
    counts = []
    with fake_tensors(family_name), torch.no_grad():
        model = _model(family.vae, json.loads(vae)).eval()
        family.prepare_vae(model)
        for latent_frames in (2, 3):
            with FlopCounterMode(display=False) as counter:
                model.decode(torch.empty(1, channels, latent_frames, side, side))
            counts.append(counter.get_total_flops())
    return (counts[1] - counts[0]) / (frames_ratio * (side * side_ratio) ** 2)


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table_of(listed_models()), indent=1) + "\n", encoding="utf-8")
    print(f"written: {TABLE}")
