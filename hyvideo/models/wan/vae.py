"""VAE of Wan2.1 and Wan2.2 TI2V-5B, which differ only in settings: diffusers' class with a faster
norm and, on a GPU, convolutions and upsampling that need fewer copies.

It decodes one group of frames after another and caches features on the module, so only one decoding
may run at a time.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyvideo.models.family import Latents
from hyvideo.models.norms import channel_rms_norm
from hyvideo.models.offload import device_of, on_device


def only_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError(
        "Wan's VAE is supported only in diffusers' layout, got _class_name "
        f"{config.get('_class_name')!r}. Download it from Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    )


def prepare(vae: nn.Module) -> None:
    """Replace diffusers' RMS norms, which use a slow vector norm, and on a GPU its convolutions and
    upsampling, with faster ones; warn if the VAE is float16.

    The norms turn an overflow, as in float16, into NaN, which the clamp at the end of decoding
    preserves, unlike an infinity: the video is then reported as failed.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import (
        WanCausalConv3d,
        WanRMS_norm,
        WanUpsample,
    )

    on_cuda = {WanCausalConv3d: causal_conv_forward, WanUpsample: upsample_forward}
    for module in vae.modules():
        if isinstance(module, WanRMS_norm):
            assert module.channel_first and isinstance(module.bias, float), (
                "the VAE's norms have no bias"
            )
            module.forward = functools.partial(channel_rms_norm, module)
        elif type(module) in on_cuda:
            module.forward = functools.partial(_forward, module, on_cuda[type(module)])
    if vae.dtype == torch.float16:
        warnings.warn(
            "Wan's VAE was published in float32 and may overflow in float16, got vae_dtype fp16. "
            "Set vae_dtype bf16",
            stacklevel=2,
        )


def _forward(
    module: nn.Module, forward: Callable[..., Tensor], hidden: Tensor, *features: Tensor | None
) -> Tensor:
    """Run ``forward`` on a GPU, and diffusers' own forward pass on a CPU."""
    if hidden.is_cuda:
        return forward(module, hidden, *features)
    return type(module).forward(module, hidden, *features)


def causal_conv_forward(layer: nn.Conv3d, hidden: Tensor, features: Tensor | None = None) -> Tensor:
    """Return the output of a causal convolution, after the features of earlier frames.

    The convolution itself pads with zeros at the sides of a frame, so only earlier frames are
    copied. Shapes: (batch, channels, frames, height, width).
    """
    width, _, height, _, before, _ = layer._padding
    if features is not None and before:
        hidden = torch.cat([features, hidden], dim=2)
        before -= features.shape[2]
    if before:
        hidden = F.pad(hidden, (0, 0, 0, 0, before, 0))
    return F.conv3d(hidden, layer.weight, layer.bias, layer.stride, (0, height, width))


def upsample_forward(layer: nn.Upsample, hidden: Tensor) -> Tensor:
    """Return the frames enlarged by repeating pixels, which is exact in every dtype, channels-last
    as the convolution after it needs them.

    Shape: (frames, channels, height, width).
    """
    hidden = hidden.contiguous(memory_format=torch.channels_last)
    return F.interpolate(hidden, scale_factor=layer.scale_factor, mode=layer.mode)


@torch.no_grad()
def given_latents(
    vae: nn.Module, first_frame: Tensor, num_frames: int = 1, last_frame: Tensor | None = None
) -> Tensor:
    """Return the latents of a video that is its given frames and zeros (gray), scaled for the
    transformer, in float32 on the CPU.

    Tiling is disabled, because it would change them. Shape: (3, height, width) to (channels,
    frames, height, width).
    """
    video = F.pad(first_frame[:, None], (0, 0, 0, 0, 0, num_frames - 1))
    if last_frame is not None:
        video[:, -1] = last_frame
    tiling = vae.use_tiling
    vae.use_tiling = False
    with on_device(vae):
        pixels = video[None].to(device_of(vae), vae.dtype)
        encoded = vae.encode(pixels).latent_dist.mode().float()
    vae.use_tiling = tiling
    return latents(vae.config).scaled(encoded)[0].cpu()


def with_mask(given: Tensor, *, has_last_frame: bool) -> Tensor:
    """Return the latents of a given video after the mask of its given frames, which has a channel
    for each of the four frames of a latent frame. The first latent frame has one frame only, whose
    mask is repeated.

    Shape: (channels, frames, height, width) to (4 + channels, frames, height, width).
    """
    mask = given.new_zeros(4, *given.shape[1:])
    mask[:, 0] = 1
    if has_last_frame:
        mask[3, -1] = 1
    return torch.cat((mask, given))


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Decode videos larger than ``tile_size`` pixels in tiles of that size; smaller videos are
    decoded whole.

    The stride is a whole number of latents, because with other strides diffusers shifts the decoded
    tiles.
    """
    side = vae.spatial_compression_ratio
    latents = tile_size // side
    stride = max(1, int(latents * (1 - overlap)))
    vae.enable_tiling(latents * side, latents * side, stride * side, stride * side)


def latents(config: Mapping[str, Any]) -> Latents:
    """Return shape and scale of a VAE's latents, from its config."""
    channels, spatial, temporal = (
        config[key] for key in ("z_dim", "scale_factor_spatial", "scale_factor_temporal")
    )
    mean, std = config["latents_mean"], config["latents_std"]
    # Inverted in float32, so that the result is bit-identical to diffusers'.
    return Latents(
        channels, temporal, spatial, tuple(mean), scale=tuple((1.0 / torch.tensor(std)).tolist())
    )
