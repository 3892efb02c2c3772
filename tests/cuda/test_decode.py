"""Decoding of a video as in a run: the VAE of `load_vae`, at the sizes, dtypes and tiles of the
recipes.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from hyvideo.data.randomness import normal
from hyvideo.models import decoding
from hyvideo.models.decoding import Tiling, decode, set_tiling
from hyvideo.models.loading import load_vae
from hyvideo.pipelines.grpo_pipeline import DTYPES
from tests.cuda import full_width
from tests.cuda.recipes import Decoding, decodings
from tests.cuda.speed import peak_gib, seconds_of
from tests.cuda.workload import DEVICE, IS_TINY

pytestmark = pytest.mark.cuda
SIZES = decodings()
HUNYUAN = next(iter(SIZES))  # a rollout of HunyuanVideo-1.5
if IS_TINY:
    SIZES = {
        name: Decoding(each.version, "fp32", (5, 64, 64), each.tile) for name, each in SIZES.items()
    }
# Tile, and whether weights are channels-last as in a run.
WAYS = {"256": (256, True), "384": (384, True), "256 channels first": (256, False)}


@pytest.fixture(scope="module")
def loaded(gpu, tmp_path_factory):
    """A function that returns the VAE of a decoding and its latents, as a run loads it."""
    vaes = {}

    def load(size):
        if size.version not in vaes:
            root = tmp_path_factory.mktemp("vae") / "checkpoints"
            full_width.write(root, size.version, ["a prompt"], is_tiny=IS_TINY)
            vaes.clear()
            vaes[size.version] = (
                root,
                load_vae(root, dtype=DTYPES[size.dtype], device=DEVICE, random_weights_seed=0),
            )
        root, vae = vaes[size.version]
        frames, height, width = size.size
        channels = vae.config.get("latent_channels") or vae.config.z_dim
        temporal, spatial = (4, 8) if "z_dim" in vae.config else (4, 16)
        shape = channels, (frames - 1) // temporal + 1, height // spatial, width // spatial
        return vae, normal(shape, 0, "latents")[None].to(DEVICE, vae.dtype)

    return load


def is_channels_last(vae):
    weights = [module.weight for module in vae.modules() if isinstance(module, torch.nn.Conv3d)]
    return all(weight.is_contiguous(memory_format=torch.channels_last_3d) for weight in weights)


def measure(record, vae, latents, tile):
    """Record seconds and memory of decoding, with TF32 for float32 as in a run.

    The first call also chooses kernels.

    Return the values of cudnn.benchmark while the VAE computed.
    """
    measuring = set()
    hook = vae.decoder.register_forward_pre_hook(
        lambda *_: measuring.add(torch.backends.cudnn.benchmark)
    )
    set_tiling(vae, Tiling(tile))
    call = torch.no_grad()(partial(decode, vae, latents))
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        record({"first, s": seconds_of(call, DEVICE)})
        videos = []
        record(
            {
                "peak GiB": peak_gib(
                    lambda: record({"s": seconds_of(lambda: videos.append(call()), DEVICE)}), DEVICE
                )
            }
        )
    finally:
        torch.backends.cudnn.allow_tf32 = before
        hook.remove()
    assert videos[0].isfinite().all()
    return measuring


@pytest.mark.parametrize("way", WAYS)
def test_ways(loaded, record, way):
    """A rollout of HunyuanVideo-1.5 as in a run, where cuDNN measures its kernels."""
    tile, channels_last = WAYS[way]
    vae, latents = loaded(SIZES[HUNYUAN])
    record({"channels-last weights": is_channels_last(vae)})
    assert is_channels_last(vae) == (DEVICE.type == "cuda")
    if not channels_last:  # the last way, because it changes the VAE
        for module in vae.modules():
            if isinstance(module, torch.nn.Conv3d):
                module.weight.data = module.weight.data.contiguous()
    assert measure(record, vae, latents, 32 if IS_TINY else tile) == {True}


@pytest.mark.parametrize("size", [name for name in SIZES if name != HUNYUAN])
def test_sizes(loaded, record, size):
    """The other sizes of the recipes."""
    vae, latents = loaded(SIZES[size])
    measure(record, vae, latents, SIZES[size].tile)


@pytest.mark.parametrize("tile", [256, 384])
def test_heuristics(loaded, record, monkeypatch, tile):
    """The same rollout with the kernels that cuDNN chooses without measuring.

    This needs a separate process: torch keeps the first choice for a shape, whether it was measured
    or not.
    """
    monkeypatch.setattr(decoding, "measured_convolutions", nullcontext)
    vae, latents = loaded(SIZES[HUNYUAN])
    assert measure(record, vae, latents, 32 if IS_TINY else tile) == {False}
