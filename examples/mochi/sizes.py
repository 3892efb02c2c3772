"""Sizes of Mochi for the planner; ``hyvideo/models/sizes.py`` has the base class, ``sizes.yaml``
measured values.

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

    num_layers: int = 48
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    pooled_projection_dim: int = 1536  # width of the text tokens
    patch_size: int = 2
    in_channels: int = 12
    out_channels: int = 12
    text_width: int = 4096
    time_embed_dim: int = 256
    # VAE
    decoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 768)
    temporal_compression_ratio: int = 6
    spatial_compression_ratio: int = 8

    num_attentions = 1
    mlp_ratio = 8 / 3
    fixed_widths = _MEASURES["saved"]
    inference_widths = _MEASURES["inference"]
    backward_widths = _MEASURES["backward"]

    @property
    def patch(self) -> tuple[int, int, int]:
        return 1, self.patch_size, self.patch_size

    @property
    def _hidden(self) -> tuple[int, int]:
        """Widths of the hidden layers of the MLPs of image and text."""
        return 8 * self.width // 3, 8 * self.pooled_projection_dim // 3

    @property
    def _image_matrices(self) -> int:
        """Parameters of a block's matrices for image tokens; its MLP is gated."""
        return 4 * self.width**2 + 3 * self.width * self._hidden[0]

    @property
    def _text_inputs(self) -> int:
        """Parameters of a block's projections of text tokens to query, key and value."""
        return 3 * self.width * self.pooled_projection_dim

    @property
    def _text_outputs(self) -> int:
        """Parameters of a block's matrices after attention of the text, which the last block does
        not have.
        """
        context = self.pooled_projection_dim
        return self.width * context + 3 * context * self._hidden[1]

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: modulation, attention with per-head norms, and gated MLPs."""
        d, context = self.width, self.pooled_projection_dim
        matrices = self._image_matrices + self._text_inputs + self._text_outputs
        modulation = linear(d, 4 * d) + linear(d, 4 * context)
        return matrices + modulation + 4 * self.attention_head_dim + d + context

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders, rotary frequencies and output layer, less what
        the last block does not have.
        """
        d = self.width
        text = self.text_width
        context = self.pooled_projection_dim
        patch = math.prod(self.patch)
        time = linear(self.time_embed_dim, d) + linear(d, d)
        pooler = linear(text, 2 * text) + linear(text, text) + linear(text, d)
        ends = linear(self.in_channels * patch, d) + linear(d, self.out_channels * patch)
        frequencies = 3 * d // 2
        absent = self._text_outputs + context + linear(d, 4 * context) - linear(d, context)
        return (
            time + pooler + linear(text, context) + ends + linear(d, 2 * d) + frequencies - absent
        )

    @property
    def matrix_parameters(self) -> int:
        matrices = self._image_matrices + self._text_inputs + self._text_outputs
        return self.num_layers * matrices - self._text_outputs

    def lora_parameters(self, rank: int) -> int:
        """Return the number of parameters of an adapter; that of a matrix has rank * (inputs +
        outputs).
        """
        d, context = self.width, self.pooled_projection_dim
        hidden, text_hidden = self._hidden
        image = 4 * 2 * d + (d + 2 * hidden) + (hidden + d)
        text_inputs = 3 * (context + d)  # query, key and value
        # projection and gated MLP, which the last block does not have
        text_outputs = (d + context) + (context + 2 * text_hidden) + (text_hidden + context)
        return rank * (self.num_layers * (image + text_inputs + text_outputs) - text_outputs)

    def block_text_tokens(self, text_tokens: int) -> int:
        return text_tokens

    def forward(self, image_tokens: int, text_tokens: int) -> ForwardFlops:
        """Return the FLOPs without modulation and embedders, which are less than 0.1 %."""
        text = self.num_layers * (self._text_inputs + self._text_outputs) - self._text_outputs
        return ForwardFlops(
            2 * self.num_layers * self._image_matrices * image_tokens,
            2 * text * text_tokens,
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
            sum(number**2 for number in sizes.decoder_block_out_channels)
            for sizes in (self, Architecture)
        )
        return channels / released

    @property
    def vae_parameters(self) -> float:
        return _MEASURES["vae"]["parameters"] * self._vae_scale

    @property
    def decode_flops(self) -> float:
        return _MEASURES["vae"]["decode_flops"] * self._vae_scale

    def decoding_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values in the feature maps of all frames, which are decoded at
        once.
        """
        return self._feature_map(videos, frames, height, width) * _MEASURES["vae"]["maps"]

    def gradient_values(self, videos: int, frames: int, height: int, width: int) -> float:
        return self._feature_map(videos, frames, height, width) * _MEASURES["vae"]["gradient_maps"]

    def _feature_map(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values of the first width at full size."""
        latent_frames = (frames - 1) // self.temporal_compression_ratio + 1
        decoded = latent_frames * self.temporal_compression_ratio  # the first ones are dropped
        return videos * decoded * height * width * self.decoder_block_out_channels[0]


def read(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Architecture:
    """Return the sizes in config.json files; ``vae`` may be empty."""
    sizes = fields_of(Architecture, transformer, {"text_embed_dim": "text_width"})
    if sizes.get("out_channels") is None:
        sizes["out_channels"] = sizes.get("in_channels", Architecture.in_channels)
    widths = fields_of(Architecture, {key: value for key, value in vae.items() if "block" in key})
    for side in ("temporal", "spatial"):
        if f"{side}_expansions" in vae:
            widths[f"{side}_compression_ratio"] = math.prod(vae[f"{side}_expansions"])
    return Architecture(**(sizes | widths))


def released(version: str) -> Architecture:
    return Architecture()
