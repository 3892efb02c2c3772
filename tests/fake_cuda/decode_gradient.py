"""Prints the peak GPU memory in GiB of decoding with a gradient, as JSON, without weights; in a
separate process.
"""

from tests.fake_cuda import checks, device  # first, before torch looks for CUDA

# isort: split

import gc
import json
import os
import sys

import torch
from diffusers import AutoencoderKLWan

from hyvideo.models.decoding import Tiling, decode_with_gradient, set_tiling
from hyvideo.models.wan.vae import prepare

WAN_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def wan(settings, dtype=torch.float32):
    with torch.device("meta"):
        vae = AutoencoderKLWan(**settings).eval()
        prepare(vae)
    device.on_device(vae.requires_grad_(False), dtype)
    return vae


def peak(vae, shape, tile, dtype):
    """Return the peak of a decoding and of its backward pass."""
    set_tiling(vae, Tiling(tile))
    latents = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
    with device.Count() as count:
        video = decode_with_gradient(vae, latents, recompute=True)
        forward = count.peak
        torch.autograd.grad(video, latents, torch.empty_like(video))
        found = max(forward, count.peak) / 2**30
        del video
        gc.collect()
    return found


def main():
    device.prepare_process()
    found = {}
    with device.fake_mode():
        for name in sys.argv[1:]:
            family, frames, height, width, tile = name.split(",")
            frames, height, width = int(frames), int(height), int(width)
            num_latent_frames = (frames - 1) // 4 + 1
            if family == "wan":
                shape = 1, 16, num_latent_frames, height // 8, width // 8
                found[name] = peak(wan({}), shape, int(tile), torch.float32)
            elif family == "wan22":
                shape = 1, 48, num_latent_frames, height // 16, width // 16
                found[name] = peak(wan(WAN_22), shape, int(tile), torch.float32)
            else:
                vae = checks.autoencoder(layers_per_block=2).requires_grad_(False)
                shape = 1, 32, num_latent_frames, height // 16, width // 16
                found[name] = peak(vae, shape, int(tile), next(vae.parameters()).dtype)
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch's threads would try to shut down the fake device


if __name__ == "__main__":
    main()
