"""Decoding of a video's tiles by several gloo processes, against one process: the same numbers."""

import hashlib
import math

import pytest
import torch

from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.tiles import Tiles
from hyvideo.models import decoding
from hyvideo.models.decoding import Tiling, decode, set_tiling, tile_size_of
from hyvideo.models.family import family_of
from tests.distributed.launch import launch
from tests.models.test_decoding import FAMILIES, small_vae, tiled

# side of a tile in pixels; with 0 there is only one tile, and two of three ranks have none
SIZES = (64, 0)


def two_frames(name, size):
    vae = small_vae(name)
    set_tiling(vae, Tiling(size, 0.125))
    ratio = family_of(vae).latents(vae.config).spatial
    return vae, torch.randn(
        1, 4, 2, 80 // ratio, 144 // ratio, generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.system
@FAMILIES
@pytest.mark.parametrize("size", SIZES)
def test_tiles_with_a_progress_bar_give_the_same_numbers(name, size):
    vae, latents = two_frames(name, size)
    shown = []
    with torch.no_grad():
        video = decode(vae, latents, Tiles(None, lambda loop: shown.extend(loop) or shown))
        assert torch.equal(video, tiled(name, size, latents))
        assert torch.equal(vae.decode(latents).sample, video)  # by the real decoder again
    assert shown == list(range(len(shown))) and len(shown) == (6 if size else 1)


# (family, side of a tile, cause of a lack of memory on one rank, after which all ranks decode in
# tiles of 64)
CASES = [
    ("hunyuan_video15", 0, "gathering"),
    ("hunyuan_video15", 64, ""),
    ("hunyuan_video15", 0, "raised"),
    ("wan", 0, "predicted"),
    ("wan", 0, ""),
]


def share():
    """Return, for a rank, the digest of the video, the tiles it decoded and the size of tiles, of
    each case.
    """
    mesh = ranks.start(3, torch.device("cpu"))
    return [outcome(mesh, *case) for case in CASES]


def outcome(mesh, name, size, cause):
    vae, latents = two_frames(name, size)
    forward, own = vae.decoder.forward, []

    def limited(hidden, *inputs, **options):
        if cause == "raised" and hidden.shape[-1] == latents.shape[-1]:
            raise torch.OutOfMemoryError("no memory")
        return forward(hidden, *inputs, **options)

    def without_memory(shape):
        del latents.new_empty  # once
        raise torch.OutOfMemoryError("no memory")

    if cause == "gathering" and mesh.rank == 1:
        latents.new_empty = without_memory
    if mesh.rank == 0:  # it has the only tile of a whole video
        vae.decoder.forward = limited
    lacks_memory = cause == "predicted" and mesh.rank == 1
    free, decoding.free_bytes = (
        decoding.free_bytes,
        lambda device: 0.0 if lacks_memory else math.inf,
    )
    with torch.no_grad():
        video = decode(
            vae,
            latents,
            Tiles(mesh.sp_group, lambda loop: [own.append(number) or number for number in loop]),
        )
    decoding.free_bytes = free
    return digest(video), own, tile_size_of(vae)


def digest(video):
    return hashlib.sha256(video.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.system
def test_ranks_share_the_tiles_and_return_the_same_video():
    outcomes = launch("tests.distributed.test_tiles:share", 3)
    for number, (name, size, cause) in enumerate(CASES):
        used = 64 if cause else size
        with torch.no_grad():
            video = tiled(name, used, two_frames(name, used)[1])
        for rank, (found, own, side) in enumerate(of_rank[number] for of_rank in outcomes):
            assert (found, side) == (digest(video), used), f"{name}, {size}, {cause}, rank {rank}"
            assert own[-2:] == ([rank, rank + 3] if used else [0] * (rank == 0))
