"""Upsamplers of super-resolution, one class per target resolution, from layers of diffusers' VAE.

Modules have the original's names. The networks do not change the size: `Upsampler.condition`
resizes the latents first.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as layers
from torch import Tensor, nn

from hyvideo.models.family import Component
from hyvideo.models.hunyuan_video15.settings import NAMES
from hyvideo.models.names import settings_to_diffusers

_NOISE = 0.7  # share of noise in the condition
_Conv = layers.HunyuanVideo15CausalConv3d


def _blocks(*parts: nn.Module) -> nn.ModuleDict:
    """Return the parts in order, under the name that the checkpoint gives them."""
    return nn.ModuleDict({"block": nn.Sequential(*parts)})


class Upsampler(nn.Module):
    """Float32 network from latents to latents of the same shape (batch, channels, frames, height,
    width).
    """

    def condition(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Return the transformer's condition: the latents, resized, upsampled and mixed with noise
        of that size.
        """
        frames = latents.transpose(1, 2).flatten(0, 1)
        resized = F.interpolate(frames, noise.shape[-2:], mode="bilinear", align_corners=False)
        upsampled = self(resized.unflatten(0, (len(latents), -1)).transpose(1, 2))
        return (1 - _NOISE) * upsampled + _NOISE * noise


class Upsampler720p(Upsampler):
    """Residual blocks of three convolutions."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        width: int,
        num_blocks: int,
        global_residual: bool,
    ):
        super().__init__()
        self.in_conv = _Conv(in_channels, width)
        self.out_conv = _Conv(width, out_channels)
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            first, second, third = (_Conv(width, width) for _ in range(3))
            self.blocks.append(_blocks(first, nn.SiLU(), second, nn.SiLU(), third))
        self.global_residual = global_residual

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.in_conv(latents)
        for block in self.blocks:
            hidden = hidden + block["block"](hidden)
        output = self.out_conv(hidden)
        if self.global_residual:
            output = output + latents
        return output


class Upsampler1080p(Upsampler):
    """Levels of the VAE's residual blocks, with an increasing number of channels."""

    def __init__(
        self,
        z_channels: int,
        out_channels: int,
        block_out_channels: tuple[int, ...],
        num_res_blocks: int,
    ):
        super().__init__()
        first, *_, last = inputs = (block_out_channels[0], *block_out_channels)
        self.repeats = first // z_channels
        self.conv_in = _Conv(z_channels, first)
        self.conv_out = _Conv(last, out_channels)
        self.norm_out = layers.HunyuanVideo15RMS_norm(last, images=False)
        self.up = nn.ModuleList()
        for before, after in zip(inputs, block_out_channels):
            widths = [before] + [after] * num_res_blocks
            self.up.append(
                _blocks(*(layers.HunyuanVideo15ResnetBlock(width, after) for width in widths))
            )

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.conv_in(latents) + latents.repeat_interleave(self.repeats, dim=1)
        for level in self.up:
            hidden = level["block"](hidden)
        return self.conv_out(F.silu(self.norm_out(hidden)))


def build(**arguments: Any) -> Upsampler:
    """Return a new upsampler, of the class that has these arguments."""
    cls = Upsampler720p if "num_blocks" in arguments else Upsampler1080p
    return cls(**arguments)


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `build` in a config.json.

    Raises ValueError if one is missing or has the wrong type.
    """
    name = "upsampler_720p" if "num_blocks" in config else "upsampler_1080p"
    return settings_to_diffusers(NAMES[name], config)


def _renamed(names: tuple[str, str], state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(*names): tensor for name, tensor in state_dict.items()}


_SHORTCUT = "nin_shortcut", "conv_shortcut"  # the original's name of a layer, and diffusers'
_renaming = partial(_renamed, _SHORTCUT), partial(_renamed, _SHORTCUT[::-1])
COMPONENT = Component("Upsampler", *_renaming, arguments_of, dict, build=build)
