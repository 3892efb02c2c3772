"""Decoding of videos in tiles that fit the GPU memory, and encoding."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyvideo.models.family import family_of
from hyvideo.models.offload import device_of, on_device
from hyvideo.models.sizes import decoding_memory

_SMALLER_TILES = (256, 192, 128, 64)  # pixels
_NUM_TRIED = 4  # kernels that cuDNN measures for each convolution of a new shape
_RESERVE = 0.5 * 2**30  # bytes for the workspaces of kernels
_FRAGMENTATION = 0.1  # of the needed memory


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


def free_bytes(device: torch.device) -> float:
    """Return the bytes that torch can still allocate on a GPU, its cache included; infinity on a
    CPU.
    """
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def use_channels_last(model: nn.Module) -> None:
    """Store the weights of convolutions channels-last, so that cuDNN computes in this layout."""
    formats = {nn.Conv2d: torch.channels_last, nn.Conv3d: torch.channels_last_3d}
    for module in model.modules():
        for kind, memory_format in formats.items():
            if isinstance(module, kind):
                module.weight.data = module.weight.data.contiguous(memory_format=memory_format)


def decode(vae: nn.Module, latents: Tensor, tiles: Any = None) -> Tensor:
    """Return the decoded videos. Shapes: (batch, channels, frames, height, width).

    ``tiles`` (`distributed.tiles.Tiles`) decodes one tile after another, perhaps on several ranks.
    If the memory that `DecodingMemory` predicts for the current tiles is not free, or after an
    OutOfMemoryError, tiles become smaller and remain so.
    """
    size = _video_size(vae, latents)
    videos, channels = latents.shape[:2]
    measured = decoding_memory(family_of(vae).name, channels)
    needed = {
        tile: measured.bytes(videos, size, tile, vae.dtype.itemsize) for tile in _tiles(vae, size)
    }
    available = free_bytes(latents.device)
    fitting = [
        tile for tile in needed if needed[tile] * (1 + _FRAGMENTATION) + _RESERVE <= available
    ]
    tile = next(iter(fitting), min(needed, key=needed.get))
    if tiles:  # the smallest of all ranks
        tile = min(tiles.of_all(tile), key=lambda side: side or math.inf)
    _reduce(vae, tile, f"{available / 2**30:.1f} GiB are free")

    def decoded() -> Tensor:
        with measured_convolutions():
            if tiles:
                return tiles.decode(vae, latents)
            return vae.decode(latents, return_dict=False)[0]

    return with_smaller_tiles(vae, latents, decoded)


def with_smaller_tiles(vae: nn.Module, latents: Tensor, decode: Callable[[], Any]) -> Any:
    """Return the result of ``decode``, which decodes ``latents``; after an OutOfMemoryError, tiles
    become smaller, and it is called again.
    """
    size = _video_size(vae, latents)
    while True:
        try:
            return decode()
        except torch.OutOfMemoryError as error:
            current, *smaller = _tiles(vae, size)
            half = [tile for tile in smaller if tile <= (current or max(size[1:])) / 2]
            if not half:
                error.add_note(
                    "The VAE's smallest tile does not fit. Add reward to offload, or set "
                    "decode_batch_size 1"
                )
                raise
        torch.cuda.empty_cache()  # the failed decoding's tensors were released with the error
        _reduce(vae, half[0], "the GPU is out of memory")


def decode_with_gradient(vae: nn.Module, latents: Tensor, *, recompute: bool) -> Tensor:
    """Return the decoded videos with their gradient by the latents.

    Shapes: (batch, channels, frames, height, width).

    With ``recompute``, only the inputs of the decoder's calls are kept, and a backward pass
    computes one call after another again: a tile or, for a VAE that decodes one latent frame after
    another, a latent frame of it.
    """
    decoder = vae.decoder
    if recompute:
        vae._modules["decoder"] = partial(_recomputed, decoder)
    try:
        with measured_convolutions():
            return vae.decode(latents, return_dict=False)[0]
    finally:
        vae._modules["decoder"] = decoder


def _recomputed(decoder: nn.Module, hidden: Tensor, **options: Any) -> Tensor:
    """Return the decoder's output, which a backward pass computes again.

    A decoder may change a list of features, its ``feat_cache``. They are inputs and outputs here,
    so that the second computation begins with the same features, and gradients flow through them to
    earlier latent frames.
    """
    features = options.pop("feat_cache", None)
    if features is None:
        return checkpoint(decoder, hidden, **options, use_reentrant=False)
    options.pop("feat_idx")

    def run(hidden: Tensor, *before: Any) -> tuple:
        after = list(before)
        output = decoder(hidden, feat_cache=after, feat_idx=[0], **options)
        return output, *after

    output, *after = checkpoint(run, hidden, *features, use_reentrant=False)
    features[:] = after
    return output


def latent_shape(
    vae: nn.Module, num_frames: int, height: int, width: int
) -> tuple[int, int, int, int]:
    """Return one video's latent shape (channels, frames, height, width)."""
    channels, temporal, spatial, *_ = family_of(vae).latents(vae.config)
    return channels, (num_frames - 1) // temporal + 1, height // spatial, width // spatial


@torch.no_grad()
def encode(vae: nn.Module, videos: Sequence[Tensor]) -> list[Tensor]:
    """Return the latents of videos, scaled for the transformer, in float32: the modes of the VAE's
    posteriors.

    Shapes: uint8 (frames, 3, height, width) to (channels, frames, height, width).
    """
    scale = family_of(vae).latents(vae.config)
    encoded = []
    with on_device(vae), measured_convolutions():
        for video in videos:
            pixels = video.to(device_of(vae)).float().transpose(0, 1)[None] / 127.5 - 1
            posterior = vae.encode(pixels.to(vae.dtype)).latent_dist
            encoded.append(scale.scaled(posterior.mode().float())[0])
    return encoded


@contextmanager
def measured_convolutions() -> Iterator[None]:
    """Let cuDNN measure its kernels for each new shape within the context, since tiles have at most
    four shapes.

    Which kernel is fastest may change from run to run, so deterministic algorithms do without this.
    """
    cudnn = torch.backends.cudnn
    if torch.are_deterministic_algorithms_enabled() or cudnn.deterministic:
        yield
        return
    was_measuring = cudnn.benchmark
    limit = cudnn.benchmark_limit
    cudnn.benchmark = True
    cudnn.benchmark_limit = _NUM_TRIED
    try:
        yield
    finally:
        cudnn.benchmark = was_measuring
        cudnn.benchmark_limit = limit


def _video_size(vae: nn.Module, latents: Tensor) -> tuple[int, int, int]:
    """Return frames, height and width of the decoded videos."""
    _, temporal, spatial, *_ = family_of(vae).latents(vae.config)
    frames, height, width = latents.shape[2:]
    return (frames - 1) * temporal + 1, height * spatial, width * spatial


def _tiles(vae: nn.Module, size: Sequence[int]) -> list[int]:
    """Return the current tile size and the smaller ones for videos of a size (frames, height,
    width).
    """
    current = tile_size_of(vae)
    return [
        current,
        *(tile for tile in _SMALLER_TILES if tile < min(current or math.inf, max(size[1:]))),
    ]


def _reduce(vae: nn.Module, tile: int, reason: str) -> None:
    old = tile_size_of(vae)
    if tile == old:
        return
    before = f"{old} pixels" if old else "whole frames"
    print(
        f"\nVAE decodes in tiles of {tile} pixels instead of {before}: {reason}",
        file=sys.stderr,
        flush=True,
    )
    set_tiling(vae, Tiling(tile, getattr(vae, "tiling", Tiling()).overlap))
