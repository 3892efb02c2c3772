"""The VAE's replaced mask and norm, compared with diffusers'."""

import copy

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock, HunyuanVideo15RMS_norm

from hyvideo.models.hunyuan_video15.vae import causal_mask, install_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cached_mask_matches_diffusers(dtype):
    device = torch.device("cpu")
    expected = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, dtype, device)
    mask = causal_mask(3, 4, dtype, device)
    assert mask.dtype == dtype
    assert torch.equal(mask, expected)
    assert causal_mask(3, 4, dtype, device) is mask


def test_a_mask_from_inference_mode_supports_a_backward_pass():
    causal_mask.cache_clear()
    with torch.inference_mode():
        mask = causal_mask(2, 3, torch.float32, torch.device("cpu"))
    assert not mask.is_inference()


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
    hidden[:, :, 0], hidden[:, :, 1] = 0, 5000 * hidden[:, :, 1]  # the sum of squares exceeds float16's 65504
    hidden = hidden.to(dtype).requires_grad_()
    expected = norm(hidden)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), hidden)
    ours = copy.deepcopy(norm)
    install_layers(ours)
    actual = ours(hidden)
    (gradient,) = torch.autograd.grad(actual.square().sum(), hidden)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient[:, :, 2], expected_gradient[:, :, 2], rtol=0, atol=100 * tolerance)
