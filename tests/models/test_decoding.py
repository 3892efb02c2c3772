"""Tests of the choice of tiles, with small VAEs of the real classes and injected lack of memory."""

import copy
import math

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, AutoencoderKLWan

from hyvideo.models import decoding
from hyvideo.models.decoding import (
    Tiling,
    decode,
    set_tiling,
    tile_size_of,
    use_channels_last,
)
from hyvideo.models.family import family_of
from hyvideo.models.sizes import decoding_memory
from tests.tiny_wan import VAE as WAN

GIB = 2**30
FRAMES, HEIGHT, WIDTH = 1, 80, 272


def small_vae(name):
    torch.manual_seed(0)
    if name == "wan":
        vae = AutoencoderKLWan(**WAN)
    else:
        vae = AutoencoderKLHunyuanVideo15(
            block_out_channels=(8,) * 5, latent_channels=4, layers_per_block=1
        )
    family_of(vae).prepare_vae(vae.eval())
    return vae.requires_grad_(False)


FAMILIES = pytest.mark.parametrize("name", ["hunyuan_video15", "wan"])


def with_latents(name, size):
    vae = small_vae(name)
    set_tiling(vae, Tiling(size, 0.125))
    ratio = family_of(vae).latents(vae.config).spatial
    return vae, torch.randn(
        1, 4, 1, HEIGHT // ratio, WIDTH // ratio, generator=torch.Generator().manual_seed(1)
    )


def tiled(name, size, latents):
    vae = small_vae(name)
    set_tiling(vae, Tiling(size, 0.125))
    return vae.decode(latents).sample


def limit(monkeypatch, vae, pixels):
    """Make the decoder raise OutOfMemoryError for tiles of more pixels along a side."""
    ratio, forward = family_of(vae).latents(vae.config).spatial, vae.decoder.forward

    def decoder(latents, *args, **kwargs):
        if max(latents.shape[-2:]) * ratio > pixels:
            raise torch.OutOfMemoryError(f"tile of {max(latents.shape[-2:]) * ratio} pixels")
        return forward(latents, *args, **kwargs)

    monkeypatch.setattr(vae.decoder, "forward", decoder)


@pytest.fixture
def cudnn():
    """cuDNN's flags, restored after the test."""
    flags = torch.backends.cudnn
    before = flags.benchmark, flags.benchmark_limit, flags.deterministic
    yield flags
    flags.benchmark, flags.benchmark_limit, flags.deterministic = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [None, "algorithms"])
def test_cudnn_measures_its_convolutions_only_while_decoding_and_not_if_deterministic(
    cudnn, deterministic
):
    vae, latents = with_latents("hunyuan_video15", 256)
    torch.use_deterministic_algorithms(deterministic == "algorithms")
    found = []
    vae.decoder.register_forward_pre_hook(
        lambda *_: found.append((cudnn.benchmark, cudnn.benchmark_limit))
    )
    before = cudnn.benchmark, cudnn.benchmark_limit
    decode(vae, latents)
    assert set(found) == ({before} if deterministic else {(True, 4)})
    assert (cudnn.benchmark, cudnn.benchmark_limit) == before


@pytest.mark.system
@FAMILIES
@pytest.mark.parametrize("size, chosen", [(256, 128), (0, 128)])
def test_a_decoding_without_memory_is_repeated_in_smaller_tiles(
    name, size, chosen, monkeypatch, capsys
):
    vae, latents = with_latents(name, size)
    limit(monkeypatch, vae, 150)
    assert torch.equal(decode(vae, latents), tiled(name, chosen, latents))
    assert f"tiles of {chosen} pixels" in capsys.readouterr().err
    assert decode(vae, latents).shape == (1, 3, FRAMES, HEIGHT, WIDTH)
    assert tile_size_of(vae) == chosen and not capsys.readouterr().err


def test_an_error_in_the_smallest_tile_reaches_the_caller(monkeypatch):
    vae, latents = with_latents("hunyuan_video15", 256)
    limit(monkeypatch, vae, 10)
    with pytest.raises(torch.OutOfMemoryError, match="tile of 64 pixels") as raised:
        decode(vae, latents)
    assert "offload" in raised.value.__notes__[0]


@FAMILIES
def test_the_largest_tile_that_fits_the_free_memory_is_chosen(name, monkeypatch, capsys):
    vae, latents = with_latents(name, 256)
    memory = decoding_memory(name, latents.shape[1])
    needed = {
        tile: memory.bytes(1, (FRAMES, HEIGHT, WIDTH), tile, 4) * 1.1 + 0.5 * GIB
        for tile in (256, 192)
    }
    free = needed[256]
    monkeypatch.setattr(decoding, "free_bytes", lambda device: free)
    assert torch.equal(decode(vae, latents), tiled(name, 256, latents))
    assert tile_size_of(vae) == 256 and not capsys.readouterr().err
    free = needed[256] - 1
    assert torch.equal(decode(vae, latents), tiled(name, 192, latents))
    free = 0.0
    decode(vae, latents)
    assert tile_size_of(vae) == 64  # the smallest is tried
    free = math.inf
    decode(vae, latents)
    assert vae.tiling == Tiling(64, 0.125)


@FAMILIES
def test_channels_last_weights_give_the_same_numbers(name):
    plain, latents = with_latents(name, 0)
    vae = copy.deepcopy(plain)
    family_of(vae).prepare_vae(vae)
    use_channels_last(vae)
    weights = [module.weight for module in vae.modules() if isinstance(module, torch.nn.Conv3d)]
    assert weights and all(
        weight.is_contiguous(memory_format=torch.channels_last_3d) for weight in weights
    )
    frames = plain.decode(latents).sample
    torch.testing.assert_close(
        vae.decode(latents).sample, frames, rtol=1e-4, atol=1e-4 * frames.std().item()
    )
    encoded = (model.encode(frames).latent_dist.mode() for model in (vae, plain))
    torch.testing.assert_close(*encoded, rtol=1e-3, atol=1e-4)
