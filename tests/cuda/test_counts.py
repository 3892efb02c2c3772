"""A block and a tile of the VAE, measured beside the counts of tests/fake_cuda, which always are of
the full size.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

from hyvideo.models.attention import Layout
from hyvideo.models.decoding import use_channels_last
from hyvideo.models.family import prepare
from hyvideo.models.hunyuan_video15.vae import install_layers
from tests.conftest import ROOT
from tests.cuda.speed import Workload, peak_gib
from tests.cuda.workload import DEVICE, IS_TINY, TINY_MODEL, TINY_VAE, drawn, median_seconds

pytestmark = pytest.mark.cuda
COUNTS = json.loads((ROOT / "tests/fake_cuda/counts.json").read_text())


@pytest.fixture
def record_part(record):
    """A function that records the measured seconds and GiB of a call, and the counts of a part."""

    def record_part(call, part):
        record({f"{part}, s": median_seconds(call, 3)})
        record({"peak GiB": peak_gib(call, DEVICE)})
        record({f"counted {name}": value for name, value in COUNTS[part].items()})

    return record_part


@pytest.fixture
def block_call(work):
    """A function that computes the first of two blocks, and its output's gradients."""
    grid = work.grid if IS_TINY else (21, 30, 54)  # the counts are those of 81 frames of 480 x 864
    few = replace(
        work, sizes=work.sizes | {"num_layers": 2}, grid=grid, text_tokens=8 if IS_TINY else 200
    )
    transformer, sizes = few.transformer(), few.architecture
    prepare(transformer, {"text"})
    randn = partial(torch.randn, device=DEVICE, dtype=work.dtype)
    cos, sin = (randn(few.tokens, sizes.attention_head_dim).float() for _ in range(2))
    layout = Layout(cos, sin, (few.text_tokens,), few.tokens)
    image, text = (randn(1, n, sizes.width).requires_grad_() for n in (few.tokens, few.text_tokens))
    time, gradients = randn(1, sizes.width), [torch.ones_like(image), torch.ones_like(text)]

    def call():
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return transformer.transformer_blocks[0](image, text, time, layout)

    return call, gradients


def test_block_forward(block_call, record_part):
    record_part(torch.no_grad()(block_call[0]), "forward of a block")


def test_block_backward(block_call, record_part):
    """The measured time includes the forward pass."""
    call, gradients = block_call
    record_part(lambda: torch.autograd.backward(call(), gradients), "backward of a block")


@pytest.mark.parametrize("frames", [81, 121])
def test_tile(gpu, record_part, frames):
    """Decodes 256 x 256 pixels, without gradient, in float16."""
    work = Workload(gpu, torch.float16, grid=((frames - 1) // 4 + 1, 16, 16))
    if IS_TINY:
        work = Workload(gpu, torch.float32, TINY_MODEL, (1, 4, 4))
    with gpu:
        vae = AutoencoderKLHunyuanVideo15(**(TINY_VAE if IS_TINY else {})).to(work.dtype).eval()
    install_layers(vae)
    use_channels_last(vae)
    latents = drawn(work, 1, "initial")[:, : vae.config.latent_channels].to(work.dtype)
    record_part(torch.no_grad()(partial(vae.decode, latents)), f"tile of {frames} frames")
