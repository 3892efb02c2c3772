"""Sizes of Wan for the planner; ``models/sizes.py`` has the base class, ``sizes.yaml`` measured
values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hyvideo.models.sizes import ForwardFlops, Sizes, fields_of, linear
from hyvideo.models.wan.settings import ANYFLOW, TEXT_SLOTS, transformer_config_to_diffusers

_MEASURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Architecture(Sizes):
    """Sizes of a model under diffusers' names; the defaults describe the 14B model."""

    num_layers: int = 40
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    ffn_dim: int = 13824
    patch: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 16
    out_channels: int = 16
    text_width: int = 4096
    freq_dim: int = 256
    reads_ends: bool = False  # AnyFlow, with a second time embedder
    # VAE
    base_dim: int = 96
    decoder_base_dim: int | None = None
    is_residual: bool = False  # the VAE of Wan2.2
    spatial_compression_ratio: int = 8
    temporal_compression_ratio: int = 4

    num_attentions, fixed_widths = 2, sum(_MEASURES["saved"].values())

    @property
    def mlp_ratio(self) -> float:
        return self.ffn_dim / self.width

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: matrices and biases, four query and key norms, a layer norm and
        modulation.
        """
        return self._matrices + (9 + 4 + 2 + 6) * self.width + self.ffn_dim

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders, output layer and its modulation."""
        d = self.width
        patch = math.prod(self.patch)
        time = linear(self.freq_dim, d) + linear(d, d)
        text = linear(self.text_width, d) + linear(d, d)
        embedders = self.num_time_embedders * time + text + linear(d, 6 * d)
        ends = linear(self.in_channels * patch, d) + linear(d, self.out_channels * patch)
        return embedders + ends + 2 * d

    @property
    def num_time_embedders(self) -> int:
        return 2 if self.reads_ends else 1

    @property
    def matrix_parameters(self) -> int:
        return self.num_layers * self._matrices

    @property
    def _matrices(self) -> int:
        return 8 * self.width**2 + 2 * self.width * self.ffn_dim

    def lora_parameters(self, rank: int) -> int:
        return rank * self.num_layers * (8 * 2 * self.width + 2 * (self.width + self.ffn_dim))

    def block_text_tokens(self, text_tokens: int) -> int:
        """Return 0: the text is an input of cross-attention and does not pass through the
        blocks.
        """
        return 0

    def forward(self, image_tokens: int, text_tokens: int) -> ForwardFlops:
        """Return the FLOPs; each block computes keys and values of 512 text tokens, including
        padding.
        """
        d, layers = self.width, self.num_layers
        ends = (self.in_channels + self.out_channels) * math.prod(self.patch) * d
        image = image_tokens * (layers * (self._matrices - 2 * d**2) + ends)
        text = TEXT_SLOTS * (layers * 2 * d**2 + self.text_width * d + d**2)
        time = self.num_time_embedders * (self.freq_dim + d) * d + 6 * d**2
        return ForwardFlops(
            2 * image,
            2 * (text + time),
            4 * layers * d * image_tokens * (image_tokens + TEXT_SLOTS),
        )

    @property
    def inference_widths(self) -> float:
        return max(
            _MEASURES["inference"]["attention"], _MEASURES["inference"]["mlp"] + 2 * self.mlp_ratio
        )

    @property
    def backward_widths(self) -> float:
        return self.mlp_ratio

    @property
    def is_released(self) -> bool:
        return self.text_width == Architecture.text_width

    def encoder_bytes(self, size: int, *, with_images: bool, in_groups: bool = False) -> float:
        return _MEASURES["text_in_groups" if in_groups else "text_encoder"] * size

    @property
    def _vae(self) -> dict[str, float]:
        """Measured values of the released VAE of this type (Wan2.1 or Wan2.2)."""
        return _MEASURES["vae"][self.is_residual]

    @property
    def _vae_channels(self) -> int:
        return self.decoder_base_dim or self.base_dim

    @property
    def _vae_scale(self) -> float:
        """Size of the convolutions relative to the released VAE, proportional to the product of
        their channels.
        """
        return (self._vae_channels / self._vae["channels"]) ** 2

    @property
    def vae_parameters(self) -> float:
        return self._vae["parameters"] * self._vae_scale

    @property
    def decode_flops(self) -> float:
        return self._vae["decode_flops"] * self._vae_scale

    def decoding_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values in the feature maps of one latent frame, as frames are
        decoded one by one.
        """
        pixels = min(frames, self.temporal_compression_ratio) * height * width
        return videos * pixels * self._vae["maps"] * self._vae_channels

    def gradient_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values while the backward pass of a latent frame computes its
        features again.

        The features that the next latent frame reads are kept for all latent frames.
        """
        pixels = min(frames, self.temporal_compression_ratio) * height * width
        latent_frames = (frames - 1) // self.temporal_compression_ratio + 1
        maps = self._vae["gradient_maps"] + self._vae["kept_maps"] * latent_frames
        return videos * pixels * maps * self._vae_channels


def read(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Architecture:
    """Return the sizes in config.json files with diffusers' names or the original's; ``vae`` may be
    empty.
    """
    class_name = transformer.get("_class_name")
    if class_name not in ("WanTransformer3DModel", ANYFLOW):
        transformer = transformer_config_to_diffusers(transformer)
    vae = {
        name: value
        for name, value in vae.items()
        if name not in ("in_channels", "out_channels", "patch_size")
    }
    names = _MEASURES["names"]
    by_channels = _MEASURES["vae_of_channels"].get(transformer.get("out_channels"), {})
    vae_fields = fields_of(Architecture, vae, names) or by_channels
    sizes = fields_of(Architecture, transformer, names) | {"reads_ends": class_name == ANYFLOW}
    return Architecture(**(vae_fields | sizes))


def released(version: str) -> Architecture:
    return Architecture(**_MEASURES["released"][version])
