"""Parameters and FLOPs, counted on models without weights.

Parameters are counted on the meta device. FLOPs are counted by torch's ``FlopCounterMode`` in the
forward pass of this project on fake tensors, with one and with two blocks, and extrapolated to all
blocks. Any family can be counted, because nothing here knows its layers.
"""

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hyvideo.models.conditions import Condition, ImageCondition
from hyvideo.models.family import Component, family_named, new_model
from hyvideo.models.lora import target_modules
from hyvideo.models.registry import package_name
from hyvideo.models.sizes import Sizes


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a transformer and its VAE."""

    total: int
    block: int
    matrices: int  # of the blocks, which Muon trains and fp8 rounds
    largest_matrix: int
    modulation: int  # layers of the blocks outside of these matrices, whose input is the timestep
    num_modulations: int  # such layers
    per_lora_rank: int  # of an adapter of rank 1
    vae: int
    is_flow_map: bool  # a flow map: its forward pass also reads where a step ends
    num_blocks: int

    @property
    def root(self) -> int:
        """Parameters outside the blocks."""
        return self.total - self.block * self.num_blocks


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass for one video and one guidance branch."""

    products: float  # matrix products outside attention
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


def count_parameters(sizes: Sizes, lora_targets: tuple[str, ...] = ()) -> Parameters:
    """Return the parameters of a model, and of a LoRA on ``lora_targets`` or all matrices."""
    return _count_parameters(sizes.family, _key(sizes.transformer), _key(sizes.vae), lora_targets)


def count_flops(sizes: Sizes, size: tuple[int, int, int], text_tokens: int) -> Flops:
    """Return the FLOPs of a forward pass for a video (frames, height, width) and its prompt."""
    return flops_of_latents(sizes, sizes.latent_size(*size), text_tokens)


def flops_of_latents(sizes: Sizes, grid: tuple[int, int, int], text_tokens: int) -> Flops:
    """Return the FLOPs of a forward pass for latents (frames, height, width) and a prompt."""
    shape = (sizes.out_channels, *grid)
    text = (text_tokens, sizes.text_width)
    transformer = _key(sizes.transformer)
    one_layer = _forward_flops(sizes.family, transformer, shape, text, num_layers=1)
    two_layers = _forward_flops(sizes.family, transformer, shape, text, num_layers=2)
    others = sizes.num_layers - 1
    return Flops(
        products=one_layer.products + others * (two_layers.products - one_layer.products),
        attention=one_layer.attention + others * (two_layers.attention - one_layer.attention),
    )


def count_decoding(sizes: Sizes) -> float:
    """Return the FLOPs of decoding per pixel and frame."""
    return _decode_flops(
        sizes.family,
        _key(sizes.vae),
        sizes.out_channels,
        sizes.temporal_compression_ratio,
        sizes.spatial_compression_ratio,
    )


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
        image = ImageCondition(None, torch.empty(*shape)) if needs_image else None
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
