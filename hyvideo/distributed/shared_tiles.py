"""Decoding of one video by the ranks of a group: tile k is decoded by rank k modulo the number of ranks."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hyvideo.models.decoding import Tiles

T = TypeVar("T")


class SharedTiles(Tiles):
    """Tiles decoded by the ranks of a group in turn. Every rank blends them in order and returns the whole video."""

    def __init__(self, group: dist.ProcessGroup, with_progress: Callable[[Iterable], Iterable] = iter):
        super().__init__(with_progress)
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def smallest(self, value: float) -> float:
        return min(self._of_all(value))

    def together(self, compute: Callable[[], T]) -> T:
        result, error = None, None
        try:
            result = compute()
        except torch.OutOfMemoryError as raised:
            error = raised
        if any(self._of_all(error is not None)):
            raise error or torch.OutOfMemoryError("the GPU of another rank is out of memory")
        return result

    def join(self, own: list[Tensor], num_tiles: int, each: int, like: Tensor) -> list[Tensor]:
        shapes = self._of_all([tuple(part.shape) for part in own])
        lengths = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
        flat = like.new_zeros(max(map(sum, lengths)))
        torch.cat([part.flatten() for part in own] or [flat[:0]], out=flat[: sum(lengths[self.rank])])
        own.clear()
        gathered = [torch.empty_like(flat) for _ in shapes]
        dist.all_gather(gathered, flat, group=self.group)
        parts = [
            [part.view(shape) for part, shape in zip(rank[: sum(sizes)].split(sizes), of_rank)]
            for rank, sizes, of_rank in zip(gathered, lengths, shapes)
        ]
        turns = [divmod(number, self.size) for number in range(num_tiles)]
        return [part for turn, rank in turns for part in parts[rank][turn * each : (turn + 1) * each]]

    def _of_all(self, value: T) -> list[T]:
        gathered: list = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered
