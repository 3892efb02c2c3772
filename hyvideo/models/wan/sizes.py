"""Sizes of Wan for the planner: their base is in ``models/sizes.py``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyvideo.models.sizes import Forward, Sizes, fields_of, linear
from hyvideo.models.wan.settings import TEXT_SLOTS, transformer_config_to_diffusers

# What a block keeps of every token for its backward pass, in tensors of the model's width, computing precision:
#   1  normalised and modulated: input of the projections
#   2  query and key before their norm
#   3  query, key and value as self-attention reads them
#   2  self-attention's output, and that output projected, for the gradient of its gate
#   2  query of cross-attention, before and after its norm
#   1  cross-attention's output, as the output projection reads it
#   5  residual stream after either attention, normalised before cross-attention and the MLP, and after the block
#   1  output of the MLP, for the gradient of its gate
# and keys and values of the text, a tenth at 81 frames; and the MLP's hidden layer twice, before and after GELU.
_FIXED_WIDTHS = 17.1
# What exists together without gradient: in self-attention, or in the MLP with the hidden layer twice. Calibrated, as
# `backward_widths`, on the operators of a block on a GPU that does not exist (tests/models/wan/counted_block.py).
_ATTENTION_WIDTHS, _MLP_WIDTHS = 9, 3
_UMT5 = 5_680_910_336


class _Vae(NamedTuple):
    """Measures of a released VAE, which grow with the channels of its decoder."""

    channels: int  # of the decoder's first width
    parameters: float
    decode_flops: float  # for each pixel and frame, counted by torch for 81 frames
    maps: float  # of these channels at full size, for each of 4 frames, at most: simulated with fake tensors


_VAE_21, _VAE_22 = _Vae(96, 126_892_531, 8.5e6, 13.1), _Vae(256, 704_688_668, 18.5e6, 5.3)


@dataclass(frozen=True)
class Architecture(Sizes):
    """Sizes of a model by diffusers' names; the defaults are diffusers', which are those of the 14B model."""

    num_layers: int = 40
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    ffn_dim: int = 13824
    patch: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 16
    out_channels: int = 16
    text_width: int = 4096
    freq_dim: int = 256
    # of the VAE
    base_dim: int = 96
    decoder_base_dim: int | None = None
    is_residual: bool = False  # the VAE of Wan2.2
    spatial_compression_ratio: int = 8
    temporal_compression_ratio: int = 4

    num_attentions, fixed_widths = 2, _FIXED_WIDTHS

    @property
    def mlp_ratio(self) -> float:
        return self.ffn_dim / self.width

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: matrices, their biases, four norms of queries and keys, a layer norm, and a table."""
        return self._matrices + (9 + 4 + 2 + 6) * self.width + self.ffn_dim

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders, output and its table."""
        d, patch, time_and_text = self.width, math.prod(self.patch), self.freq_dim + self.text_width
        embedders = linear(time_and_text, d) + linear(d, d) * 2 + linear(d, 6 * d) + d
        ends = linear(self.in_channels * patch, d) + linear(d, self.out_channels * patch)
        return embedders + ends + 2 * d

    @property
    def matrix_parameters(self) -> int:
        return self.num_layers * self._matrices

    @property
    def _matrices(self) -> int:
        return 8 * self.width**2 + 2 * self.width * self.ffn_dim

    def lora_parameters(self, rank: int) -> int:
        return rank * self.num_layers * (8 * 2 * self.width + 2 * (self.width + self.ffn_dim))

    def block_text_tokens(self, text_tokens: int) -> int:
        """Return 0: cross-attention reads the text, which does not go through the blocks."""
        return 0

    def forward(self, image_tokens: int, text_tokens: int) -> Forward:
        """Texts of any length are padded to 512 tokens; each block makes keys and values of them."""
        d, layers = self.width, self.num_layers
        ends = (self.in_channels + self.out_channels) * math.prod(self.patch) * d
        image = image_tokens * (layers * (self._matrices - 2 * d**2) + ends)
        text = TEXT_SLOTS * (layers * 2 * d**2 + self.text_width * d + d**2)
        time = (self.freq_dim + 7 * d) * d
        return Forward(2 * image, 2 * (text + time), 4 * layers * d * image_tokens * (image_tokens + TEXT_SLOTS))

    @property
    def inference_widths(self) -> float:
        return max(_ATTENTION_WIDTHS, _MLP_WIDTHS + 2 * self.mlp_ratio)

    @property
    def backward_widths(self) -> float:
        return self.mlp_ratio

    @property
    def is_released(self) -> bool:
        return self.text_width == Architecture.text_width

    def encoder_bytes(self, size: int, *, with_images: bool) -> float:
        return _UMT5 * size

    @property
    def _vae(self) -> _Vae:
        """Measures of the VAE; a convolution grows with the product of its channels."""
        released = _VAE_22 if self.is_residual else _VAE_21
        channels = self.decoder_base_dim or self.base_dim
        scale = (channels / released.channels) ** 2
        return _Vae(channels, released.parameters * scale, released.decode_flops * scale, released.maps)

    @property
    def vae_parameters(self) -> float:
        return self._vae.parameters

    @property
    def decode_flops(self) -> float:
        return self._vae.decode_flops

    def decoding_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Feature maps of the frames of one latent frame: they are decoded one after another."""
        pixels = min(frames, self.temporal_compression_ratio) * height * width
        return videos * pixels * self._vae.maps * self._vae.channels


_WAN22_VAE = {"base_dim": 160, "decoder_base_dim": 256, "is_residual": True, "spatial_compression_ratio": 16}
_FIELDS = {
    "patch_size": "patch",
    "text_dim": "text_width",
    "scale_factor_spatial": "spatial_compression_ratio",
    "scale_factor_temporal": "temporal_compression_ratio",
}
_RELEASED = {
    "wan2.1_t2v_1.3b": Architecture(num_layers=30, num_attention_heads=12, ffn_dim=8960),
    "wan2.1_t2v_14b": Architecture(),
    "wan2.2_ti2v_5b": Architecture(
        num_layers=30, num_attention_heads=24, ffn_dim=14336, in_channels=48, out_channels=48, **_WAN22_VAE
    ),
}


def read(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Architecture:
    """Return the sizes that config.json files give, in diffusers' names or the original's; ``vae`` may be empty."""
    if transformer.get("_class_name") != "WanTransformer3DModel":
        transformer = transformer_config_to_diffusers(transformer)
    vae = {name: value for name, value in vae.items() if name not in ("in_channels", "out_channels", "patch_size")}
    of_vae = fields_of(Architecture, vae, _FIELDS) or (_WAN22_VAE if transformer.get("out_channels") == 48 else {})
    return Architecture(**(of_vae | fields_of(Architecture, transformer, _FIELDS)))


def released(version: str) -> Architecture:
    """Return the sizes of a released version."""
    return _RELEASED[version]
