"""Sizes of HunyuanVideo-1.5 for the planner; ``models/sizes.py`` has the base class, ``sizes.yaml``
measured values.

The parameter count is exact (tested against diffusers' class).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hyvideo.models.hunyuan_video15.settings import (
    transformer_config_to_diffusers,
    vae_config_to_diffusers,
)
from hyvideo.models.sizes import ForwardFlops, Sizes, fields_of, linear
from hyvideo.models.versions import RELEASED

_MEASURES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_TIME_DIM = 256  # sinusoidal embedding of a timestep
_GLYPH_HIDDEN = 2048  # hidden width of the ByT5 projection, independent of the model's width


@dataclass(frozen=True)
class Architecture(Sizes):
    """Sizes of a model under diffusers' names; the defaults describe the released 480p and 720p
    models.
    """

    num_layers: int = 54  # double blocks
    num_refiner_layers: int = 2
    num_attention_heads: int = 16
    attention_head_dim: int = 128
    mlp_ratio: float = 4.0
    patch_size: int = 1
    patch_size_t: int = 1
    in_channels: int = 65  # noisy latents, condition latents, mask
    out_channels: int = 32
    text_width: int = 3584
    text_embed_2_dim: int = 1472
    image_embed_dim: int = 1152
    use_meanflow: bool = False
    is_released: bool = True
    # VAE
    spatial_compression_ratio: int = 16
    temporal_compression_ratio: int = 4
    block_out_channels: tuple[int, ...] = (128, 256, 512, 1024, 1024)

    num_attentions = 1
    fixed_widths = sum(_MEASURES["saved"].values())
    backward_widths = _MEASURES["backward"]

    @property
    def patch(self) -> tuple[int, int, int]:
        return self.patch_size_t, self.patch_size, self.patch_size

    @property
    def block_parameters(self) -> int:
        """Parameters of a double block: modulation, attention and MLP for image and text, and four
        per-head norms.
        """
        d = self.width
        return 2 * (linear(d, 6 * d) + 4 * linear(d, d) + self._mlp) + 4 * self.attention_head_dim

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedders, text refiner, output."""
        d = self.width
        text_dim = self.text_width
        glyph_dim = self.text_embed_2_dim
        image_dim = self.image_embed_dim
        time = linear(_TIME_DIM, d) + linear(d, d)
        refiner_block = 2 * 2 * d + 4 * linear(d, d) + self._mlp + linear(d, 2 * d)
        text = linear(text_dim, d) + time + linear(text_dim, d) + linear(d, d)
        glyph = 2 * glyph_dim + linear(glyph_dim, _GLYPH_HIDDEN)
        glyph += linear(_GLYPH_HIDDEN, _GLYPH_HIDDEN) + linear(_GLYPH_HIDDEN, d)
        image = 2 * image_dim + linear(image_dim, image_dim) + linear(image_dim, d) + 2 * d
        patch = math.prod(self.patch)
        ends = (
            linear(self.in_channels * patch, d)
            + linear(d, 2 * d)
            + linear(d, self.out_channels * patch)
        )
        kinds = 3 * d
        times = 2 * time if self.use_meanflow else time
        return text + self.num_refiner_layers * refiner_block + glyph + image + ends + kinds + times

    @property
    def matrix_parameters(self) -> int:
        return 2 * self.num_layers * self._token_parameters

    @property
    def modulation_parameters(self) -> int:
        return self.num_modulations * linear(self.width, 6 * self.width)

    @property
    def num_modulations(self) -> int:
        return 2 * self.num_layers

    @property
    def _token_parameters(self) -> int:
        """Parameters of a block's matrices for one stream, image or text, without modulation, norms
        and biases.
        """
        return 4 * self.width**2 + 2 * self.hidden * self.width

    def lora_parameters(self, rank: int) -> int:
        """Return the number of parameters of an adapter on all attention and MLP layers that have a
        gradient.
        """
        d = self.width
        mlp = 2 * (d + self.hidden)
        # the text outputs of the last block are not used
        return rank * (2 * self.num_layers * (8 * d + mlp) - 2 * d - mlp)

    def block_text_tokens(self, text_tokens: int) -> int:
        return text_tokens

    def forward(self, image_tokens: int, text_tokens: int) -> ForwardFlops:
        """Return the FLOPs without modulation and embedders, which are less than 0.1 %."""
        per_token = 2 * self.num_layers * self._token_parameters
        attention = 4 * (image_tokens + text_tokens) ** 2 * self.width * self.num_layers
        return ForwardFlops(per_token * image_tokens, per_token * text_tokens, attention)

    @property
    def inference_widths(self) -> float:
        return _MEASURES["inference"] + 2 * self.mlp_ratio

    def encoder_bytes(self, size: int, *, with_images: bool, in_groups: bool = False) -> float:
        text, glyph, image = _MEASURES["encoders"].values()
        text = _MEASURES["text_in_groups"] if in_groups else text
        return (text + image * with_images) * size + glyph * 4

    @property
    def vae_parameters(self) -> float:
        """Parameters of the VAE: as many as the released VAE has, scaled by the sum of the squared
        channels.
        """
        channels, released = (sum(c**2 for c in a.block_out_channels) for a in (self, Architecture))
        return _MEASURES["vae"]["parameters"] * channels / released

    @property
    def decode_flops(self) -> float:
        return (
            _MEASURES["vae"]["decode_flops"]
            * (self.block_out_channels[0] / Architecture.block_out_channels[0]) ** 2
        )

    def decoding_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values in the feature maps of the tiles and in the mask of the
        attention layer.
        """
        feature_map = frames * height * width * self.block_out_channels[0]
        latent_frames = (frames - 1) // self.temporal_compression_ratio + 1
        tokens = latent_frames * height * width // self.spatial_compression_ratio**2
        return videos * _MEASURES["vae"]["maps"] * feature_map + tokens**2

    def gradient_values(self, videos: int, frames: int, height: int, width: int) -> float:
        """Return the number of values while the backward pass of a tile computes its residual
        blocks again.
        """
        feature_map = frames * height * width * self.block_out_channels[0]
        return videos * _MEASURES["vae"]["gradient_maps"] * feature_map

    @property
    def reads_ends(self) -> bool:
        return self.use_meanflow

    @property
    def _mlp(self) -> int:
        return linear(self.width, self.hidden) + linear(self.hidden, self.width)


def read(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Architecture:
    """Return the sizes in config.json files with diffusers' names or the original's; ``vae`` may be
    empty.
    """
    sizes = _named(transformer, "HunyuanVideo15Transformer3DModel", transformer_config_to_diffusers)
    vae_sizes = _named(vae, "AutoencoderKLHunyuanVideo15", vae_config_to_diffusers) if vae else {}
    # in_channels are the transformer's
    found, released = Architecture(**(vae_sizes | sizes)), Architecture()
    is_released = (found.text_width, found.width) == (released.text_width, released.width)
    return replace(found, is_released=is_released)


def released(version: str) -> Architecture:
    """Return the sizes of a released version."""
    return Architecture(use_meanflow=RELEASED[version].reads_ends)


def _named(
    config: Mapping[str, Any], class_name: str, to_diffusers: Callable[[Mapping], dict]
) -> dict[str, Any]:
    config = config if config.get("_class_name") == class_name else to_diffusers(config)
    return fields_of(Architecture, config, {"text_embed_dim": "text_width"})
