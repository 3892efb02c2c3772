"""Decoding of a video tile by tile, in one process or by the ranks of a group in turn: the same
numbers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyvideo.distributed.collectives import all_objects, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh


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
            Mesh(dist.get_rank(group), dist.get_world_size(group), 1) if group else Mesh(0, 1, 1)
        )

    def decode(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Return the decoded videos. Shapes: (batch, channels, frames, height, width)."""
        calls: list = []
        _run(
            vae,
            latents,
            lambda *inputs, **options: calls.append((inputs, options)) or inputs[0].to("meta"),
        )
        # A decoder may take one latent frame after another; the calls of a tile then share a cache
        # of features.
        each = latents.shape[2] // calls[0][0][0].shape[2]
        tiles = [calls[i : i + each] for i in range(0, len(calls), each)]
        calls.clear()
        with raise_on_all_ranks(self.ranks, self.group, (torch.OutOfMemoryError,)):
            outputs = self._decode_own(vae.decoder, tiles)
        outputs = self._gather(outputs, len(tiles), each, latents) if self.group else outputs
        with raise_on_all_ranks(self.ranks, self.group, (torch.OutOfMemoryError,)):
            return _run(vae, latents, lambda *inputs, **options: outputs.pop(0))

    def of_all(self, value: Any) -> list:
        """Return the values of all ranks, in rank order."""
        return all_objects(value, self.ranks, self.group)

    def _decode_own(self, decoder: nn.Module, tiles: list) -> list[Tensor]:
        outputs = []
        for number in self.with_progress(range(self.ranks.rank, len(tiles), self.ranks.world_size)):
            outputs += [decoder(*inputs, **options) for inputs, options in tiles[number]]
            tiles[number] = None  # frees the cache
        return outputs

    def _gather(self, own: list[Tensor], num_tiles: int, each: int, like: Tensor) -> list[Tensor]:
        """Return all ranks' outputs in the order of the tiles, ``each`` outputs per tile."""
        shapes = self.of_all([part.shape for part in own])
        owners = [number % len(shapes) for number in range(num_tiles) for _ in range(each)]
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


def _run(vae: nn.Module, latents: Tensor, decoder: Callable[..., Tensor]) -> Tensor:
    """Return ``vae.decode(latents)`` with another decoder."""
    real, vae._modules["decoder"] = vae.decoder, decoder
    try:
        return vae.decode(latents, return_dict=False)[0]
    finally:
        vae._modules["decoder"] = real
