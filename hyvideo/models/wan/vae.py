"""The VAE of Wan2.1 and of Wan2.2 TI2V-5B, which differ in their settings only: diffusers' class with a faster norm.

It decodes a group of frames after the other and keeps what a group needs of the one before on the module: no second
decode may begin before the first has ended.
"""

import functools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyvideo.models.family import Latents
from hyvideo.models.norms import channels_normalised
from hyvideo.models.versions import version_defaults
from hyvideo.models.wan.encoders import load_text_encoder


def only_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError(
        f"the VAE of Wan is read and written in diffusers' layout only, got _class_name "
        f"{config.get('_class_name')!r}; download it from Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    )


def prepare(vae: nn.Module) -> None:
    """Replace the norm, for which torch takes a vector norm over channels, by a sum of squares; warn of float16.

    The clamp at the end of decoding keeps the NaN that the norms make of an overflow. It hides an infinity that the
    last convolution makes.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    for module in vae.modules():
        if isinstance(module, WanRMS_norm):
            assert module.channel_first and isinstance(module.bias, float), "the VAE's norms have channels and no bias"
            module.forward = functools.partial(channels_normalised, module)
    if vae.dtype == torch.float16:
        warnings.warn(
            "vae_dtype is fp16, in which Wan's VAE may overflow: it was published for float32. Set vae_dtype to fp32",
            stacklevel=2,
        )


def set_tiling(vae: nn.Module, tile_size: int, overlap: float) -> None:
    """Have videos larger than a tile of ``tile_size`` pixels decoded in tiles; smaller ones are not touched.

    The distance between tiles is a number of whole latents: with any other diffusers shifts what it decodes.
    """
    side = vae.spatial_compression_ratio
    latents = tile_size // side
    if latents < 1:
        raise ValueError(f"vae_tile_size must be at least {side} pixels, one latent, got {tile_size}; 0 decodes whole")
    stride = max(1, int(latents * (1 - overlap)))
    vae.enable_tiling(latents * side, latents * side, stride * side, stride * side)


def latents(config: Mapping[str, Any]) -> Latents:
    """Return shape and scale of a VAE's latents, from its config. Raises ValueError where its settings disagree."""
    channels, spatial, temporal = (config[key] for key in ("z_dim", "scale_factor_spatial", "scale_factor_temporal"))
    halvings, patch = len(config["dim_mult"]) - 1, config["patch_size"] or 1
    found = 2**halvings * patch, 2 ** sum(config["temperal_downsample"][:halvings])
    if (spatial, temporal) != found:
        raise ValueError(
            f"scale_factor_spatial and _temporal must be {found} by the VAE's layers, got {spatial, temporal}"
        )
    mean, std = config["latents_mean"], config["latents_std"]
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        are_numbers = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
        if not are_numbers or len(values) != channels or (values is std and min(values) <= 0):
            raise ValueError(f"{name} must be {channels} numbers, deviations above 0, got {values}")
    # Of float32 numbers, as diffusers: to the last bit.
    return Latents(channels, temporal, spatial, tuple(mean), divisor=tuple((1.0 / torch.tensor(std)).tolist()))


def export_parts(
    root: Path, out: Path, *, version: str | None, task: str, dtype: torch.dtype, load_vae: Callable[..., nn.Module]
) -> Iterator[tuple[str, Any]]:
    """Yield the names and the parts of a `WanPipeline` but the transformer; a part is freed before the next."""
    import diffusers

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}
    yield "scheduler", diffusers.UniPCMultistepScheduler(**flow, flow_shift=version_defaults(version).shift)
    yield "vae", load_vae(root, dtype=torch.float32)
    yield "text_encoder", load_text_encoder(root, dtype=dtype)[1]
    shutil.copytree(root / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    yield "tokenizer", ("transformers", "PreTrainedTokenizerFast")  # which leaves tokenizer.json as it is
