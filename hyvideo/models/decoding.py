"""Decoding of videos in tiles that fit the GPU memory, in one process or shared by several."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hyvideo.models.family import family_of
from hyvideo.models.sizes import Sizes, sizes_module

_SMALLER_TILES = (256, 192, 128, 64)  # pixels
_RESERVE, _FRAGMENTATION = 0.5 * 2**30, 0.1  # workspaces of kernels in bytes; fraction of the needed memory


T = TypeVar("T")


class Tiling(NamedTuple):
    """Side of a tile in pixels, 0 for whole frames, and overlap as a fraction of a tile."""

    size: int = 0
    overlap: float = 0.125


def set_tiling(vae: nn.Module, tiling: Tiling) -> None:
    """Set the tiles of `decode`. Raises ValueError if they are too small."""
    if tiling.size:
        family_of(vae).set_tiling(vae, tiling.size, tiling.overlap)
    vae.tiling = tiling


def tile_size_of(vae: nn.Module) -> int:
    return getattr(vae, "tiling", Tiling()).size


def use_channels_last(model: nn.Module) -> None:
    """Store the weights of 3D convolutions channels-last, so that cuDNN computes in this layout."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)


def free_bytes(device: torch.device) -> float:
    """Return the bytes that torch can still allocate on a GPU, its cache included; infinity on a CPU."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


class Tiles:
    """Decodes tile by tile with a progress bar; ``distributed.shared_tiles`` has the version for several ranks.

    The VAE's own decoding runs twice: with a decoder that only records its inputs, and, after the tiles are decoded,
    with one that returns them to be blended. The numbers are those of a single pass.
    """

    rank, size = 0, 1

    def __init__(self, with_progress: Callable[[Iterable], Iterable] = iter):
        self.with_progress = with_progress  # wraps the loop over this rank's tiles

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Return the decoded videos. Shapes: (batch, channels, frames, height, width)."""
        calls: list = []
        with _decoder_replaced(vae, lambda *inputs, **options: calls.append((inputs, options)) or inputs[0].to("meta")):
            vae.decode(latents)
        # A decoder may take one latent frame after another; the calls of a tile then share a cache of features.
        each = latents.shape[2] // calls[0][0][0].shape[2]
        tiles = [calls[i : i + each] for i in range(0, len(calls), each)]
        calls.clear()
        own = self.together(lambda: self._decode_own(vae, tiles))
        outputs = self.join(own, len(tiles), each, latents)
        with _decoder_replaced(vae, lambda *inputs, **options: outputs.pop(0)):
            return self.together(lambda: vae.decode(latents, return_dict=False)[0])

    def _decode_own(self, vae: nn.Module, tiles: list) -> list[Tensor]:
        outputs = []
        for number in self.with_progress(range(self.rank, len(tiles), self.size)):
            outputs += [vae.decoder(*inputs, **options) for inputs, options in tiles[number]]
            tiles[number] = None  # frees the cache
        return outputs

    def smallest(self, value: float) -> float:
        """Return the smallest value of all ranks."""
        return value

    def together(self, compute: Callable[[], T]) -> T:
        """Return ``compute()``. Raises OutOfMemoryError on all ranks if any rank does."""
        return compute()

    def join(self, own: list[Tensor], num_tiles: int, each: int, like: Tensor) -> list[Tensor]:
        """Return all ranks' outputs in the order of the tiles, ``each`` outputs per tile."""
        return own


@contextmanager
def _decoder_replaced(vae: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    own = vars(vae.decoder).get("forward")
    vae.decoder.forward = forward
    try:
        yield
    finally:
        del vae.decoder.forward
        if own:
            vae.decoder.forward = own


def decode(vae: nn.Module, latents: Tensor, tiles: Tiles | None = None) -> Tensor:
    """Return the decoded videos, with ``tiles`` as it decodes them. Shapes: (batch, channels, frames, height, width).

    If the memory that `Sizes` predicts for the current tiles is not free, or after an OutOfMemoryError, tiles become
    smaller and remain so.
    """
    sizes, (videos, _, *latent_size) = _sizes(vae), latents.shape
    size = sizes.video_size(*latent_size)
    needed = {tile: sizes.decoding_bytes(videos, size, tile, vae.dtype.itemsize) for tile in _tiles(vae, size)}
    available = free_bytes(latents.device)
    fitting = [tile for tile in needed if needed[tile] * (1 + _FRAGMENTATION) + _RESERVE <= available]
    tile = next(iter(fitting), min(needed, key=needed.get))
    agreed = tiles.smallest(tile or math.inf) if tiles else tile
    _reduce(vae, 0 if agreed == math.inf else agreed, f"{available / 2**30:.1f} GiB are free")
    while True:
        try:
            return tiles.decode(vae, latents) if tiles else vae.decode(latents, return_dict=False)[0]
        except torch.OutOfMemoryError as error:
            current, *smaller = _tiles(vae, size)
            half = [tile for tile in smaller if tile <= (current or max(size[1:])) / 2]
            if not half:
                error.add_note("The VAE's smallest tile does not fit. Set reward_offload true or decode_batch_size 1")
                raise
        torch.cuda.empty_cache()  # the failed decoding's tensors were released with the error
        _reduce(vae, half[0], "the GPU is out of memory")


def _tiles(vae: nn.Module, size: Sequence[int]) -> list[int]:
    """Return the current tile size and the smaller ones for videos of a size (frames, height, width)."""
    current = tile_size_of(vae)
    return [current, *(tile for tile in _SMALLER_TILES if tile < min(current or math.inf, max(size[1:])))]


def _reduce(vae: nn.Module, tile: int, reason: str) -> None:
    if tile != (old := tile_size_of(vae)):
        before = f"{old} pixels" if old else "whole frames"
        print(f"\nVAE decodes in tiles of {tile} pixels instead of {before}: {reason}", file=sys.stderr, flush=True)
        set_tiling(vae, Tiling(tile, getattr(vae, "tiling", Tiling()).overlap))


def _sizes(vae: nn.Module) -> Sizes:
    family = family_of(vae)
    names = {"_class_name": family.transformer.class_name}, {"_class_name": family.vae.class_name}
    return sizes_module(family.name).read(names[0], dict(vae.config) | names[1])
