"""The VAE's replaced mask and norm, compared with diffusers'."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15AttnBlock,
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15Decoder3D,
    HunyuanVideo15ResnetBlock,
    HunyuanVideo15RMS_norm,
)
from torch.utils.checkpoint import checkpoint

from hyvideo.models.hunyuan_video15.vae import (
    causal_conv_forward,
    causal_mask,
    decoder_forward,
    install_layers,
    replication_pad,
    resnet_forward,
    set_tiling,
)
from hyvideo.models.norms import fused_channel_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cached_mask_matches_diffusers(dtype):
    device = torch.device("cpu")
    expected = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, dtype, device)
    mask = causal_mask(3, 4, dtype, device)
    assert mask.dtype == dtype
    assert torch.equal(mask, expected)
    assert causal_mask(3, 4, dtype, device) is mask


# Rounding errors of the dtype: of both results, and of intermediate values in 16 bits.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_the_norm_matches_diffusers_within_rounding_for_small_and_large_values(dtype, tolerance):
    norm = HunyuanVideo15RMS_norm(32, images=False).to(dtype)
    with torch.no_grad():
        norm.gamma.copy_(torch.linspace(-2, 2, 32)[:, None, None, None])
    hidden = torch.randn(2, 32, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    # the sum of squares exceeds float16's 65504
    hidden[:, :, 0], hidden[:, :, 1] = 0, 5000 * hidden[:, :, 1]
    hidden = hidden.to(dtype).requires_grad_()
    expected = norm(hidden)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), hidden)
    ours = copy.deepcopy(norm)
    install_layers(ours)
    actual = ours(hidden)
    (gradient,) = torch.autograd.grad(actual.square().sum(), hidden)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        gradient[:, :, 2], expected_gradient[:, :, 2], rtol=0, atol=100 * tolerance
    )


# --- forward passes for a GPU, run on the CPU -----------------------------------------------------

ON_CUDA = {
    HunyuanVideo15Decoder3D: decoder_forward,
    HunyuanVideo15ResnetBlock: resnet_forward,
    HunyuanVideo15CausalConv3d: causal_conv_forward,
    HunyuanVideo15RMS_norm: lambda norm, hidden: fused_channel_rms_norm(norm.gamma, hidden),
}


@torch.no_grad()
def test_the_gpu_passes_match_diffusers():
    stock = AutoencoderKLHunyuanVideo15(
        block_out_channels=(8, 16, 16, 32, 32), latent_channels=4
    ).eval()
    ours = copy.deepcopy(stock)
    for module in ours.modules():
        if type(module) in ON_CUDA:
            module.forward = partial(ON_CUDA[type(module)], module)
    latents = torch.randn(1, 4, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    frames = stock.decode(latents).sample
    torch.testing.assert_close(
        ours.decode(latents).sample, frames, rtol=0, atol=1e-5 * frames.abs().max().item()
    )
    posteriors = (vae.encode(frames).latent_dist.mode() for vae in (ours, stock))
    torch.testing.assert_close(*posteriors, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [(1, 1, 1, 1, 2, 0), (0, 0, 0, 0, 0, 0), (1, 2, 0, 3, 0, 1)])
def test_the_padding_equals_torch(padding):
    hidden = torch.randn(2, 3, 4, 5, 6)
    padded = replication_pad(hidden, padding)
    assert torch.equal(padded, F.pad(hidden, padding, mode="replicate"))
    assert padded.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("padding", [(1, 1, 1, 1, 2, 0), (0, 0, 0, 0, 0, 0), (1, 2, 0, 3, 0, 1)])
def test_the_gradient_of_the_padding_equals_torch_and_is_channels_last(padding, silu):
    hidden = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = F.pad(F.silu(hidden) if silu else hidden, padding, mode="replicate")
    by_output = torch.randn_like(expected)
    (expected_gradient,) = torch.autograd.grad(expected, hidden, by_output)
    before = by_output.clone()
    (gradient,) = torch.autograd.grad(
        replication_pad(hidden, padding, silu=silu), hidden, by_output
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-14, atol=1e-14)
    assert gradient.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(by_output, before)


def test_the_gpu_passes_have_the_gradient_of_diffusers_also_where_blocks_are_computed_again():
    """In double precision, so that only another formula would differ."""
    stock = AutoencoderKLHunyuanVideo15(
        block_out_channels=(8, 16, 16, 32, 32), latent_channels=4
    ).double()
    stock.eval().requires_grad_(False)
    ours = copy.deepcopy(stock)
    for module in ours.modules():
        if type(module) is HunyuanVideo15ResnetBlock:
            module.forward = partial(checkpoint, resnet_forward, module, use_reentrant=False)
        elif type(module) in ON_CUDA:
            module.forward = partial(ON_CUDA[type(module)], module)
    latents = torch.randn(1, 4, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    frames = [vae.decode(latents).sample for vae in (stock, ours)]
    by_frames = torch.randn_like(frames[0])
    expected, gradient = (torch.autograd.grad(each, latents, by_frames)[0] for each in frames)
    assert (gradient - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("overlap", [0.0, 0.125, 0.2])
@pytest.mark.parametrize("tile", [64, 256])
def test_tiles_are_placed_where_they_are_cropped(tile, overlap):
    vae = AutoencoderKLHunyuanVideo15(
        block_out_channels=(8,) * 5, latent_channels=4, layers_per_block=1
    )
    set_tiling(vae, tile, overlap)
    stride = int(vae.tile_latent_min_height * (1 - vae.tile_overlap_factor))
    assert 16 * stride == tile - int(tile * vae.tile_overlap_factor)
    assert overlap <= vae.tile_overlap_factor < overlap + 16 / tile
    with pytest.raises(ValueError, match="vae_tile_size"):
        set_tiling(vae, 15, overlap)
