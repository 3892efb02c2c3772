"""Sizes of CogVideoX-2B for the planner; ``hyvideo/models/sizes.py`` has the base class,
``sizes.yaml`` measured values.

The parameter count is exact (tested against diffusers' class).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hyvideo.models.sizes import ForwardFlops, Sizes, fields_of, linear

_MEASURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Architecture(Sizes):
    """Sizes of a model under diffusers' names; the defaults describe the released model."""

    num_layers: int = 30
    num_attention_heads: int = 30
    attention_head_dim: int = 64
    patch_size: int = 2
    in_channels: int = 16
    out_channels: int = 16
    time_embed_dim: int = 512
    text_width: int = 4096
    # VAE
    block_out_channels: tuple[int, ...] = (128, 256, 256, 512)
    temporal_compression_ratio: int = 4

    num_attentions = 1
    mlp_ratio = 4
    fixed_widths = _MEASURES["saved"]
    inference_widths = _MEASURES["inference"]
    backward_widths = _MEASURES["backward"]

    @property
    def patch(self) -> tuple[int, int, int]:
        return 1, self.patch_size, self.patch_size

    @property
    def spatial_compression_ratio(self) -> int:
        return 2 ** (len(self.block_out_channels) - 1)

    def check_frames(self, frames: int, name: str = "the number of frames") -> None:
        """Raise ValueError unless the number of latent frames is odd: the VAE decodes an even number
        of latent frames into too many frames.
        """
        step = 2 * self.temporal_compression_ratio
        if (frames - 1) % step:
            below = (frames - 1) // step * step + 1
            raise ValueError(
                f"{name} must be {step}n + 1, because the VAE decodes pairs of latent frames after "
                f"the first one, got {frames}; use {below} or {below + step}"
            )

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: two modulated norms, attention with per-head norms, and MLP."""
        d = self.width
        norm = linear(self.time_embed_dim, 6 * d) + 2 * d
        attention = 4 * linear(d, d) + 4 * self.attention_head_dim
        return 2 * norm + attention + linear(d, 4 * d) + linear(4 * d, d)

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders and output layer."""
        d = self.width
        patch = math.prod(self.patch)
        time = linear(d, self.time_embed_dim) + linear(self.time_embed_dim, self.time_embed_dim)
        ends = linear(self.in_channels * patch, d) + linear(d, self.out_channels * patch)
        norms = 2 * d + linear(self.time_embed_dim, 2 * d) + 2 * d
        return time + linear(self.text_width, d) + ends + norms

    @property
    def _block_matrices(self) -> int:
        return 12 * self.width**2

    @property
    def matrix_parameters(self) -> int:
        return self.num_layers * self._block_matrices

    def lora_parameters(self, rank: int) -> int:
        return rank * self.num_layers * (4 * 2 + 2 * 5) * self.width

    def block_text_tokens(self, text_tokens: int) -> int:
        return _MEASURES["text_slots"]  # texts are padded

    def forward(self, image_tokens: int, text_tokens: int) -> ForwardFlops:
        """Return the FLOPs without modulation and embedders, which are less than 1 %."""
        text_tokens = self.block_text_tokens(text_tokens)
        return ForwardFlops(
            2 * self.matrix_parameters * image_tokens,
            2 * self.matrix_parameters * text_tokens,
            4 * (image_tokens + text_tokens) ** 2 * self.width * self.num_layers,
        )

    @property
    def is_released(self) -> bool:
        return self.text_width == Architecture.text_width

    def encoder_bytes(self, size: int, *, with_images: bool, in_groups: bool = False) -> float:
        return _MEASURES["text_in_groups" if in_groups else "text_encoder"] * size

    @property
    def _vae_scale(self) -> float:
        """Size of the convolutions relative to the released VAE."""
        channels, released = (
            sum(number**2 for number in sizes.block_out_channels) for sizes in (self, Architecture)
        )
        return channels / released

    @property
    def vae_parameters(self) -> float:
        return _MEASURES["vae"]["parameters"] * self._vae_scale

    @property
    def decode_flops(self) -> float:
        return _MEASURES["vae"]["decode_flops"] * self._vae_scale

    def decoding_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values in the feature maps of one call of the decoder, which decodes
        three latent frames at first and then two at a time.
        """
        at_once = min(frames, 2 * self.temporal_compression_ratio + 1)
        return videos * at_once * height * width * self._vae_channels * _MEASURES["vae"]["maps"]

    def gradient_values(self, videos: int, frames: int, height: int, width: int) -> float:
        at_once = min(frames, 2 * self.temporal_compression_ratio + 1)
        maps = at_once * _MEASURES["vae"]["gradient_maps"]
        maps += (frames - at_once) * _MEASURES["vae"]["kept_maps"]
        return videos * maps * height * width * self._vae_channels

    @property
    def _vae_channels(self) -> int:
        return self.block_out_channels[0]


def read(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Architecture:
    """Return the sizes in config.json files; ``vae`` may be empty."""
    sizes = fields_of(Architecture, transformer, {"text_embed_dim": "text_width"})
    names = ("block_out_channels", "temporal_compression_ratio")
    widths = fields_of(Architecture, {name: vae[name] for name in names if name in vae})
    return Architecture(**(sizes | widths))


def released(version: str) -> Architecture:
    return Architecture()
