"""Decoding with a gradient: recomputed tiles and latent frames give the gradient of the whole
graph.
"""

import pytest
import torch
from diffusers import AutoencoderKLWan

from hyvideo.models.decoding import Tiling, decode_with_gradient, set_tiling
from hyvideo.models.loading import load_vae
from hyvideo.models.wan.tiny import drawn
from hyvideo.models.wan.vae import prepare
from tests.conftest import ROOT
from tests.tiny_wan import VAE


def miniature():
    return load_vae(str(ROOT / "assets" / "miniature"), dtype=torch.float32, device="cpu")


def wan():
    vae = drawn(AutoencoderKLWan(**VAE), 1).requires_grad_(False)
    prepare(vae)
    return vae


@pytest.mark.system
@pytest.mark.parametrize("tile", [0, 16])
@pytest.mark.parametrize("make", [miniature, pytest.param(wan, marks=pytest.mark.slow)])
def test_recomputation_changes_neither_videos_nor_gradients(make, tile):
    vae = make()
    side = 4 if make is miniature else 8
    set_tiling(vae, Tiling(tile, 0.5))
    torch.manual_seed(0)
    latents = torch.randn(1, 4, 3, 24 // side, 32 // side)
    found = {}
    calls = []
    vae.decoder.register_forward_pre_hook(lambda *inputs: calls.append(1))
    for recompute in (False, True):
        calls.clear()
        leaf = latents.clone().requires_grad_()
        video = decode_with_gradient(vae, leaf, recompute=recompute)
        num_calls = len(calls)
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad((video * torch.randn_like(video)).sum(), leaf)
        assert len(calls) == (2 if recompute else 1) * num_calls
        found[recompute] = video.detach(), gradient
    assert num_calls == (12 if tile else 1) * (1 if make is miniature else 3)
    for one, other in zip(found[False], found[True]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # A causal decoder: the first video frame depends only on the first latent frame.
    leaf = latents.clone().requires_grad_()
    decode_with_gradient(vae, leaf, recompute=True)[:, :, 0].square().sum().backward()
    reached = leaf.grad.abs().amax((0, 1, 3, 4)) > 0
    assert reached.tolist() == [True, False, False]
    with torch.no_grad():
        assert torch.equal(vae.decode(latents, return_dict=False)[0], found[False][0])
