"""VAE without weights: the latents are pixels.

The network was trained on logarithms of brightness, from 0 to about ``peak``. A pixel of a video has
the value ``latents / peak``, and is gray.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from hyvideo.models.family import Latents


class GalaxyPixels(ModelMixin, ConfigMixin):
    """Pixels between -1 and 1 of latents between 0 and ``peak``."""

    @register_to_config
    def __init__(self, peak: float = 11.0):
        super().__init__()
        # tells the device and the dtype of the VAE, which has no other parameter
        self.scale = nn.Parameter(torch.ones(1))
        self.encoder = nn.Identity()
        self.decoder = nn.Identity()

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return videos (batch, 3, frames, height, width) of latents with one channel."""
        brightness = self.decoder(latents * self.scale) / self.config.peak
        return ((2 * brightness - 1).clamp(-1, 1).expand(-1, 3, -1, -1, -1),)

    def encode(self, videos: Tensor) -> SimpleNamespace:
        """Return the latents of videos as a distribution without variance."""
        brightness = (self.encoder(videos).mean(1, keepdim=True) + 1) / 2
        latents = brightness * self.config.peak
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))


def only_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError(
        f"galaxies are read only in diffusers' layout, got _class_name {config.get('_class_name')!r}. "
        "Write the checkpoint with python -m examples.galaxies.convert"
    )


def latents(config: Mapping[str, Any]) -> Latents:
    """Return shape and scale of the latents: those of the video, unchanged."""
    return Latents(channels=1, temporal=1, spatial=1, mean=(0.0,), scale=(1.0,))


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Do nothing, because a pixel depends on no other."""
