"""Prints the share of the inputs and weights that the convolutions of a decoding on a GPU must first
copy because they are not channels-last, as JSON; in a separate process.
"""

from tests.fake_cuda import checks, decode_gradient, device  # first, before torch looks for CUDA

# isort: split

import json
import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyvideo.models.decoding import decode_with_gradient, use_channels_last

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Copied(TorchDispatchMode):
    """Dispatch mode that adds up the bytes of inputs and weights that a convolution reads."""

    def __init__(self):
        super().__init__()
        self.read = self.copied = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator.overloadpacket.__name__ == "convolution":
            for tensor in arguments[:2]:
                self.read += tensor.nbytes
                if not tensor.is_contiguous(memory_format=FORMATS[tensor.dim()]):
                    self.copied += tensor.nbytes
        return operator(*arguments, **(options or {}))


def layouts(vae, channels, side, *, with_gradient):
    """Return the share for 9 frames of 64 x 96."""
    dtype = next(vae.parameters()).dtype
    shape = 1, channels, 3, 64 // side, 96 // side
    latents = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=with_gradient)
    with Copied() as copied, torch.set_grad_enabled(with_gradient):
        video = decode_with_gradient(vae, latents, recompute=with_gradient)
        if with_gradient:
            torch.autograd.grad(video, latents, torch.empty_like(video))
    return copied.copied / copied.read


def main():
    device.prepare_process()
    found = {}
    with device.fake_mode():
        vaes = {
            "hunyuan": (checks.autoencoder(layers_per_block=2).requires_grad_(False), 32, 16),
            "wan": (decode_gradient.wan({}, torch.bfloat16), 16, 8),
        }
        for name, (vae, channels, side) in vaes.items():
            use_channels_last(vae)
            for part, with_gradient in (("decode", False), ("gradient", True)):
                found[f"{name}, {part}"] = layouts(vae, channels, side, with_gradient=with_gradient)
    print(json.dumps(found), flush=True)
    os._exit(0)  # torch's threads would try to shut down the fake device


if __name__ == "__main__":
    main()
