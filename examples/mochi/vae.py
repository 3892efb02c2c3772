"""VAE of Mochi: shape and scale of its latents, and tiles.

Its decoder returns a tensor and a cache (`Family.decoder_returns_cache`).
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from hyvideo.models.family import Latents


def only_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError(
        f"Mochi is supported only in diffusers' layout, got _class_name {config.get('_class_name')!r}. "
        "Download genmo/mochi-1-preview with its folders transformer, vae and text_encoder"
    )


def latents(config: Mapping[str, Any]) -> Latents:
    """Return shape and scale of a VAE's latents, from its config."""
    scale = config["scaling_factor"]
    return Latents(
        channels=config["latent_channels"],
        temporal=math.prod(config["temporal_expansions"]),
        spatial=math.prod(config["spatial_expansions"]),
        mean=tuple(config["latents_mean"]),
        scale=tuple(scale / std for std in config["latents_std"]),
    )


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Decode videos larger than ``tile_size`` pixels in tiles of whole latents; smaller videos are
    decoded whole.
    """
    side = vae.spatial_compression_ratio
    latents = tile_size // side
    stride = max(1, int(latents * (1 - overlap)))
    vae.enable_tiling(latents * side, latents * side, stride * side, stride * side)
