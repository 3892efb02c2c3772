"""Decoding with a gradient, as in a run with reward gradients: its speed, its memory, and the
gradient of the CPU.
"""

import copy
from functools import partial

import pytest
import torch

from hyvideo.models.decoding import (
    Tiling,
    decode_with_gradient,
    measured_convolutions,
    set_tiling,
)
from tests.cuda.recipes import Decoding, recipe
from tests.cuda.speed import peak_gib, seconds_of
from tests.cuda.test_decode import loaded  # noqa: F401 - a fixture
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda
DRAFTS = ["hunyuanvideo15_480p_8gpu_draft", "wan21_1gpu_draft"]


def decoding_of(name, frames=None):
    model = recipe(name).config.model
    if IS_TINY:
        return Decoding(model.transformer_version, "fp32", (5, 64, 64), 32)
    size = recipe(name).config.sampling.size
    size = (frames or size[0], *size[1:])
    return Decoding(model.transformer_version, model.vae_dtype, size, model.vae_tile_size)


def gradient_of(vae, latents):
    """Return the gradient of the sum of weighted pixels by the latents."""
    latents = latents.clone().requires_grad_()
    video = decode_with_gradient(vae, latents, recompute=latents.is_cuda)
    weights = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    with measured_convolutions():
        (gradient,) = torch.autograd.grad(video, latents, weights.to(video))
    return gradient


@pytest.mark.parametrize("part", ["tile", "video"])
@pytest.mark.parametrize("name", DRAFTS)
def test_speed_and_memory(loaded, record, name, part):  # noqa: F811
    """Records the seconds and the peak of the second call, beside the planned peak."""
    size = decoding_of(name)
    vae, latents = loaded(size)
    set_tiling(vae, Tiling(size.tile))
    if part == "tile" and size.tile:
        side = size.tile // (size.size[1] // latents.shape[3])
        latents = latents[..., :side, :side]
    found = []
    call = partial(lambda: found.append(gradient_of(vae, latents).float()))
    record({"first, s": seconds_of(call, DEVICE)})
    peak = peak_gib(lambda: record({"s": seconds_of(call, DEVICE)}), DEVICE)
    record({"peak GiB": peak})
    planned = recipe(name).sizes.decoding.gradient_bytes(
        1, size.size, size.tile, vae.dtype.itemsize
    )
    record({"planned GiB": planned / 2**30})
    # Random weights in float16 may overflow, which a run counts as a missing reward.
    record({"finite": found[-1].isfinite().float().mean().item()})


@pytest.mark.parametrize("name", DRAFTS)
def test_the_gradient_equals_that_of_the_cpu(loaded, record, name):  # noqa: F811
    """Nine frames of a small tile in float32, where the CPU computes with diffusers' layers."""
    vae, latents = loaded(decoding_of(name))
    latents = latents[:, :, :3, :4, :4].float()
    exact = copy.deepcopy(vae).float()
    set_tiling(exact, Tiling(64))
    ours = gradient_of(exact, latents).cpu()
    theirs = gradient_of(exact.cpu(), latents.cpu())
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    record({"difference": difference})
    assert difference < 1e-3


def test_repeats(loaded, record):  # noqa: F811
    """Bit-identical with CHECK_DETERMINISTIC, where each operation must have such a kernel."""
    vae, latents = loaded(decoding_of(DRAFTS[0], frames=9))
    set_tiling(vae, Tiling(32 if IS_TINY else 128))
    gradients = [gradient_of(vae, latents[..., :8, :8]) for _ in range(2)]
    assert gradients[0].isfinite().all()
    same = torch.equal(*gradients)
    record({"bit for bit": same, "deterministic": torch.are_deterministic_algorithms_enabled()})
    assert same or not torch.are_deterministic_algorithms_enabled()
