"""Which (world, sp_size, batch_size, num_generations) a run may have, and which of them are near the asked one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.run_shape import RunShape
from hyvideo.config.rules import batch_problems
from hyvideo.config.settings import Config


@dataclass(frozen=True)
class Combination:
    """The numbers that the rollouts of an iteration are dealt by."""

    world_size: int
    sp_size: int
    batch_size: int
    num_generations: int

    @staticmethod
    def of(shape: RunShape) -> "Combination":
        return Combination(shape.world_size, shape.sp_size, shape.batch_size, shape.num_generations)

    @property
    def replicas(self) -> int:
        return self.world_size // self.sp_size

    def distance(self, other: "Combination") -> float:
        """Doublings between the two, over all numbers; another number of GPUs weighs twice."""
        pairs = (
            (2, self.world_size, other.world_size),
            (1, self.sp_size, other.sp_size),
            (1, self.batch_size, other.batch_size),
            (1, self.num_generations, other.num_generations),
        )
        return sum(weight * abs(math.log2(own / theirs)) for weight, own, theirs in pairs)

    def __str__(self) -> str:
        return (
            f"world_size {self.world_size}, sp_size {self.sp_size}, batch_size {self.batch_size}, "
            f"num_generations {self.num_generations} (dp {self.replicas})"
        )


def problems(config: Config, shape: RunShape, architecture: Architecture) -> list[str]:
    """What forbids a run of this shape."""
    found = []
    if architecture.num_heads % shape.sp_size:
        found.append(f"sp_size must divide the {architecture.num_heads} attention heads, got {shape.sp_size}")
    if shape.world_size % (shape.dp_replicate * shape.sp_size) and not shape.world_size % shape.sp_size:
        found.append(f"dp_replicate must divide the {shape.replicas} replicas, got {shape.dp_replicate}")
    numbers = {
        "sp_size": shape.sp_size,
        "batch_size": shape.batch_size,
        "num_generations": shape.num_generations,
    }
    changed = config.with_settings(**numbers)
    updates = config.loss.num_updates_per_rollout
    return found + list(batch_problems(changed.rollout, changed.distributed, updates, shape.world_size))


def combinations_near(config: Config, shape: RunShape, architecture: Architecture, limit: int) -> list[Combination]:
    """Legal ones, nearest first; the asked one is first if it is legal."""
    asked = Combination.of(shape)
    legal = [c for c in _neighbours(asked) if not problems(config, with_combination(shape, c), architecture)]
    return sorted(legal, key=lambda c: (c.distance(asked), c.world_size, c.sp_size))[:limit]


def with_combination(shape: RunShape, combination: Combination) -> RunShape:
    return replace(
        shape,
        world_size=combination.world_size,
        sp_size=combination.sp_size,
        batch_size=combination.batch_size,
        num_generations=combination.num_generations,
    )


def _neighbours(asked: Combination) -> Iterator[Combination]:
    """Halves and doubles of each number, and the multiples of sp_size around the world size."""
    for sp_size in _around(asked.sp_size):
        whole = asked.world_size // sp_size * sp_size
        nearest = {whole, whole + sp_size} if whole != asked.world_size else set()
        for world_size in {*_around(asked.world_size), *nearest} - {0}:
            for batch_size in {*_around(asked.batch_size), asked.batch_size + 1}:
                for num_generations in _around(asked.num_generations):
                    yield Combination(world_size, sp_size, batch_size, num_generations)


def _around(number: int) -> list[int]:
    return sorted({max(1, number // 2), number, 2 * number})
