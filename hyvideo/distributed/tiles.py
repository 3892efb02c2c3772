"""Decoding of a video tile by tile, in one process or by the ranks of a group in turn: the same
numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyvideo.distributed.collectives import all_objects, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.family import family_of


class _Call(NamedTuple):
    """Inputs of a call of the decoder."""

    inputs: tuple
    options: dict[str, Any]

    @property
    def num_frames(self) -> int:
        return self.inputs[0].shape[2]


class _CacheOf(NamedTuple):
    """Stands for the cache that a call of the decoder will return."""

    call: _Call


class Tiles:
    """Decodes tile k on rank k modulo the number of ranks; every rank blends them and returns the
    whole video.

    The VAE's own decoding runs twice: with a decoder that only records its inputs and, after the
    tiles are decoded, with one that returns them to be blended. ``with_progress`` wraps the loop
    over this rank's tiles.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, with_progress: Callable[[Iterable], Iterable] = iter
    ):
        self.group, self.with_progress = group, with_progress
        self.ranks = (
            Mesh(dist.get_rank(group), dist.get_world_size(group), 1) if group else Mesh.single()
        )

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Return the decoded videos. Shapes: (batch, channels, frames, height, width)."""
        returns_cache = family_of(vae).decoder_returns_cache
        tiles = _tiles(_recorded(vae, latents, returns_cache), latents.shape[2])
        lengths = [len(tile) for tile in tiles]
        with raise_on_all_ranks(self.ranks, self.group, (torch.OutOfMemoryError,)):
            outputs = self._decode_own(vae.decoder, tiles, returns_cache)
        if self.group:
            outputs = self._gather(outputs, lengths, latents)

        def blended(*inputs: Any, **options: Any) -> Any:
            output = outputs.pop(0)
            return (output, None) if returns_cache else output

        with raise_on_all_ranks(self.ranks, self.group, (torch.OutOfMemoryError,)):
            return _run(vae, latents, blended)

    def of_all(self, value: Any) -> list:
        """Return the values of all ranks, in rank order."""
        return all_objects(value, self.ranks, self.group)

    def _decode_own(
        self, decoder: nn.Module, tiles: list[list[_Call] | None], returns_cache: bool
    ) -> list[Tensor]:
        outputs = []
        for number in self.with_progress(range(self.ranks.rank, len(tiles), self.ranks.world_size)):
            caches = {}
            for call in tiles[number]:
                options = {
                    name: caches.pop(id(value.call)) if isinstance(value, _CacheOf) else value
                    for name, value in call.options.items()
                }
                output = decoder(*call.inputs, **options)
                if returns_cache:
                    output, caches[id(call)] = output
                outputs.append(output)
            tiles[number] = None  # frees the inputs
        return outputs

    def _gather(self, own: list[Tensor], lengths: Sequence[int], like: Tensor) -> list[Tensor]:
        """Return all ranks' outputs in the order of the tiles; ``lengths`` are the outputs of each
        tile.
        """
        shapes = self.of_all([part.shape for part in own])
        owners = [
            number % len(shapes) for number, length in enumerate(lengths) for _ in range(length)
        ]
        # no rank may miss a broadcast
        with raise_on_all_ranks(self.ranks, self.group, (torch.OutOfMemoryError,)):
            parts = ((own if rank == self.ranks.rank else shapes[rank]).pop(0) for rank in owners)
            outputs = [
                part.contiguous() if isinstance(part, Tensor) else like.new_empty(part)
                for part in parts
            ]
        for rank, part in zip(owners, outputs):
            dist.broadcast(part, dist.get_global_rank(self.group, rank), group=self.group)
        return outputs


def _recorded(vae: nn.Module, latents: Tensor, returns_cache: bool) -> list[_Call]:
    """Return the calls of the decoder while the VAE decodes, without decoding."""
    calls: list[_Call] = []

    def record(*inputs: Any, **options: Any) -> Any:
        calls.append(_Call(inputs, options))
        output = inputs[0].to("meta")
        return (output, _CacheOf(calls[-1])) if returns_cache else output

    _run(vae, latents, record)
    return calls


def _tiles(calls: Iterable[_Call], num_frames: int) -> list[list[_Call] | None]:
    """Return the calls of each tile.

    A decoder may take some latent frames after others; the calls of a tile then share a cache.
    """
    tiles: list[list[_Call] | None] = []
    missing = 0  # latent frames of the last tile
    for call in calls:
        if missing <= 0:
            tiles.append([])
            missing = num_frames
        tiles[-1].append(call)
        missing -= call.num_frames
    return tiles


def _run(vae: nn.Module, latents: Tensor, decoder: Callable[..., Any]) -> Tensor:
    """Return ``vae.decode(latents)`` with another decoder."""
    real, vae._modules["decoder"] = vae.decoder, decoder
    try:
        return vae.decode(latents, return_dict=False)[0]
    finally:
        vae._modules["decoder"] = real
