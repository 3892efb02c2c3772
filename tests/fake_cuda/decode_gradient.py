"""Prints the peak GPU memory in GiB of decoding with a gradient, as JSON, without weights; in a separate process."""

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


def wan():
    with torch.device("meta"):
        vae = AutoencoderKLWan().eval()
        prepare(vae)
    device.on_device(vae.requires_grad_(False), torch.float32)
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
            if family == "wan":
                shape = 1, 16, (frames - 1) // 4 + 1, height // 8, width // 8
                found[name] = peak(wan(), shape, int(tile), torch.float32)
            else:
                vae = checks.autoencoder(layers_per_block=2).requires_grad_(False)
                shape = 1, 32, (frames - 1) // 4 + 1, height // 16, width // 16
                found[name] = peak(vae, shape, int(tile), next(vae.parameters()).dtype)
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch's threads would try to shut down the fake device


if __name__ == "__main__":
    main()
