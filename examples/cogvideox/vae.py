"""VAE of CogVideoX: shape and scale of its latents, and tiles.

Its decoder returns a tensor and a cache (`Family.decoder_returns_cache`).
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from torch import nn

from hyvideo.models.family import Latents


def only_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError(
        "CogVideoX is supported only in diffusers' layout, got _class_name "
        f"{config.get('_class_name')!r}. Download THUDM/CogVideoX-2b with its folders transformer, "
        "vae and text_encoder"
    )


def latents(config: Mapping[str, Any]) -> Latents:
    """Return shape and scale of a VAE's latents, from its config."""
    return Latents(
        channels=config["latent_channels"],
        temporal=int(config["temporal_compression_ratio"]),
        spatial=2 ** (len(config["block_out_channels"]) - 1),
        mean=(0.0,),
        scale=(config["scaling_factor"],),
    )


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Decode videos larger than ``tile_size`` pixels in tiles of whole latents; smaller videos are
    decoded whole.
    """
    side = latents(vae.config).spatial
    length = tile_size // side
    if length < 1:
        raise ValueError(
            f"vae_tile_size must be at least {side} pixels or 0 (no tiling), got {tile_size}"
        )
    stride = max(1, int(length * (1 - overlap)))
    vae.enable_tiling(length * side, length * side)
    # diffusers multiplies by the overlap and rounds down, which is exact only for a fraction.
    vae.tile_overlap_factor_height = Fraction(length - stride, length)
    vae.tile_overlap_factor_width = vae.tile_overlap_factor_height
