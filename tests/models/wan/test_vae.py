"""Tests of Wan's VAE with the replaced norm and tiling, compared with diffusers'
unmodified class.
"""

import copy
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanRMS_norm,
    WanUpsample,
)

from hyvideo.models.norms import fused_channel_rms_norm
from hyvideo.models.wan.tiny import drawn
from hyvideo.models.wan.vae import (
    causal_conv_forward,
    latents,
    prepare,
    set_tiling,
    upsample_forward,
)
from tests.forked import built_once
from tests.tiny_wan import VAE as SMALL
from tests.tiny_wan import VAE_22

CONVOLUTIONS = torch.nn.Conv3d | torch.nn.Conv2d
CONFIGS = pytest.mark.parametrize("config", [SMALL, VAE_22], ids=["2.1", "2.2"])


@built_once
def made(**config):
    return drawn(AutoencoderKLWan(**config), 1).requires_grad_(False)


def stock_and_ours(config):
    stock = made(**config)
    ours = copy.deepcopy(stock)
    prepare(ours)
    return stock, ours


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def assert_same(actual, expected, tolerance=1e-5):
    assert actual.shape == expected.shape
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@CONFIGS
def test_frames_and_latents_match_diffusers(config):
    stock, ours = stock_and_ours(config)
    frames = stock.decode(noise(1, 4, 3, 2, 3)).sample
    side = 8 * (config.get("patch_size") or 1)
    assert frames.shape == (1, 3, 9, 2 * side, 3 * side)
    assert_same(ours.decode(noise(1, 4, 3, 2, 3)).sample, frames)
    assert_same(
        ours.encode(frames).latent_dist.mode(), stock.encode(frames).latent_dist.mode(), 1e-4
    )


@CONFIGS
@pytest.mark.parametrize(
    ("tile", "overlap"), [(44, 0.3), pytest.param(24, 0.9, marks=pytest.mark.slow)]
)
def test_tiled_frames_match_diffusers_and_have_the_full_size(config, tile, overlap):
    stock, ours = stock_and_ours(config)
    side = 8 * (config.get("patch_size") or 1)
    tiles = tile // side
    stride = max(1, int(tiles * (1 - overlap)))
    stock.enable_tiling(tiles * side, tiles * side, stride * side, stride * side)
    set_tiling(ours, tile, overlap)
    height, width = (5, 7) if side == 8 else (3, 4)
    part = noise(1, 4, 2, height, width)
    decoded = ours.decode(part).sample
    assert decoded.shape[-2:] == (height * side, width * side)
    assert_same(decoded, stock.decode(part).sample)


def test_tiles_and_strides_are_rounded_down_to_whole_latents():
    """diffusers rounds tiles but not strides: with 54 pixels, all tiles after the first are
    shifted.
    """
    _, vae = stock_and_ours(SMALL)
    set_tiling(vae, 60, 0.2)
    assert (vae.tile_sample_min_height, vae.tile_sample_stride_width) == (56, 40)
    set_tiling(vae, 256, 0.125)
    assert (vae.tile_sample_min_width, vae.tile_sample_stride_height) == (256, 224)
    set_tiling(vae, 8, 0.125)


@pytest.mark.parametrize(
    "config, tile", [(SMALL, 32), (VAE_22, 0)], ids=["2.1 in tiles", "2.2 whole"]
)
def test_decoding_a_batch_matches_single_videos(config, tile):
    _, vae = stock_and_ours(config)
    if tile:
        set_tiling(vae, tile, 0.25)
    both = noise(2, 4, 2, 3, 6)
    assert_same(
        vae.decode(both).sample, torch.cat([vae.decode(video[None]).sample for video in both])
    )


# Rounding errors of the dtype: of both results, and of intermediate values in 16 bits.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
@pytest.mark.parametrize("images", [False, True])
def test_the_norm_matches_diffusers_within_rounding(dtype, tolerance, images):
    norm = WanRMS_norm(32, images=images).to(dtype)
    with torch.no_grad():
        norm.gamma.copy_(torch.linspace(-2, 2, 32).view_as(norm.gamma))
    hidden = noise(2, 32, 4, 4) if images else noise(2, 32, 3, 4, 4)
    # the sum of squares exceeds float16's 65504
    hidden[:, :, 0], hidden[:, :, 1] = 0, 5000 * hidden[:, :, 1]
    expected = norm(hidden.to(dtype))
    ours = copy.deepcopy(norm)
    vae = AutoencoderKLWan(**SMALL)
    vae.decoder.norm_out = ours
    prepare(vae)
    torch.testing.assert_close(ours(hidden.to(dtype)), expected, rtol=tolerance, atol=tolerance)


def test_scaling_of_latents_is_bit_identical_to_diffusers():
    shape = latents(AutoencoderKLWan(**SMALL).config)
    assert shape[:3] == (4, 4, 8)
    assert latents(AutoencoderKLWan(**VAE_22).config)[:3] == (4, 4, 16)
    with torch.device("meta"):
        released = AutoencoderKLWan().config  # the class's defaults are the released mean and std
    mean, std = (
        torch.tensor(released[key]).view(1, 16, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    part = noise(2, 16, 2, 3, 3)
    shape = latents(released)
    assert shape[:3] == (16, 4, 8)
    assert torch.equal(shape.unscaled(part), part / (1.0 / std) + mean)
    assert torch.equal(shape.scaled(part), (part - mean) * (1.0 / std))
    torch.testing.assert_close(shape.scaled(shape.unscaled(part)), part, rtol=0, atol=1e-6)


def test_float16_raises_a_warning(recwarn):
    vae = AutoencoderKLWan(**SMALL)
    for dtype in (torch.float32, torch.bfloat16):
        prepare(vae.to(dtype))
    assert not recwarn
    with pytest.warns(UserWarning, match="vae_dtype"):
        prepare(vae.to(torch.float16))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_non_finite_values_in_the_decoder_are_visible_after_the_clamp(number):
    """The clamp to [-1, 1] hides infinity, but norms turn infinities before the last layer into NaN
    (inf / inf).
    """
    _, vae = stock_and_ours(SMALL)
    part = noise(1, 4, 2, 2, 2)
    part[0, 1, 1, 1, 1] = number
    assert not vae.decode(part).sample.isfinite().all()
    # A single non-finite query may disappear in the CPU's attention.
    layers = {
        name: module
        for name, module in vae.decoder.named_modules()
        if isinstance(module, CONVOLUTIONS)
    }
    assert layers.pop("conv_out") is vae.decoder.conv_out
    for layer in (layer for name, layer in layers.items() if not name.endswith("to_qkv")):
        handle = layer.register_forward_hook(
            lambda layer, args, out: out.masked_fill(out == out.max(), number)
        )
        assert not vae.decode(noise(1, 4, 2, 2, 2)).sample.isfinite().all(), layer
        handle.remove()


# --- forward passes for a GPU, run on the CPU -----------------------------------------------------


ON_CUDA = {
    WanCausalConv3d: causal_conv_forward,
    WanUpsample: upsample_forward,
    WanRMS_norm: lambda norm, hidden: fused_channel_rms_norm(norm.gamma, hidden),
}


@CONFIGS
def test_the_gpu_passes_and_their_gradient_match_diffusers(config):
    """In double precision, so that only another formula would differ."""
    stock, ours = stock_and_ours(config)
    for vae, on_cuda in ((stock, {WanUpsample: torch.nn.Upsample.forward}), (ours, ON_CUDA)):
        for module in vae.double().modules():  # diffusers' own upsampling rounds to float32
            if type(module) in on_cuda:
                module.forward = partial(on_cuda[type(module)], module)
    part = noise(2, 4, 3, 2, 3).double().requires_grad_()
    frames = [vae.decode(part).sample for vae in (stock, ours)]
    assert_same(frames[1], frames[0], 1e-12)
    by_frames = torch.randn_like(frames[0])
    expected, gradient = (torch.autograd.grad(each, part, by_frames)[0] for each in frames)
    assert (gradient - expected).norm() < 1e-12 * expected.norm()
    videos = frames[0].detach()
    encoded = [vae.encode(videos).latent_dist.mode() for vae in (ours, stock)]
    assert_same(*encoded, 1e-12)
