"""A run that is planned: settings on a number of GPUs, whether they may be, and what is legal near them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.phases import Memory, memory
from hyvideo.config.memory.run_shape import RunShape
from hyvideo.config.rules import batch_problems, layout_problems
from hyvideo.config.settings import Config

_DEALT = ("sp_size", "batch_size", "num_generations")  # with the number of GPUs they deal the rollouts


@dataclass(frozen=True)
class PlannedRun:
    """Settings and a transformer on ``world_size`` GPUs."""

    config: Config
    world_size: int
    architecture: Architecture
    text_tokens: int = 300  # of the longest prompt

    @cached_property
    def shape(self) -> RunShape:
        return RunShape.of(self.config, self.world_size, text_tokens=self.text_tokens)

    @cached_property
    def memory(self) -> Memory:
        return memory(self.shape, self.architecture)

    @cached_property
    def layout_problems(self) -> list[str]:
        """Reasons why the GPUs cannot be laid out so."""
        settings = self.config.distributed
        heads = self.architecture.num_heads
        return list(layout_problems(self.world_size, settings.sp_size, settings.dp_replicate, heads))

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the run is not legal."""
        return self.layout_problems or list(
            batch_problems(
                self.config.rollout,
                self.config.distributed,
                self.config.loss.num_updates_per_rollout,
                self.world_size,
            )
        )

    def with_settings(self, **changes) -> "PlannedRun":
        """The same run with other settings."""
        return replace(self, config=self.config.with_settings(**changes))

    def legal_near(self) -> Iterator["PlannedRun"]:
        """Legal runs by the doublings to get there; doublings of the world size weigh twice.

        They have half, the same and twice each number, and the multiples of sp_size around the world size.
        """
        asked = (self.world_size, *(self.config.flat()[name] for name in _DEALT))
        around = [{max(1, number // 2), number, 2 * number} for number in asked]
        for sp_size in around[1]:
            if rest := self.world_size % sp_size:
                around[0] |= {self.world_size - rest, self.world_size - rest + sp_size} - {0}

        def distance(numbers: tuple[int, ...]) -> tuple:
            doublings = [abs(math.log2(number / start)) for number, start in zip(numbers, asked)]
            return doublings[0] + sum(doublings), *numbers

        for world_size, *dealt in sorted(itertools.product(*around), key=distance):
            near = replace(self.with_settings(**dict(zip(_DEALT, dealt))), world_size=world_size)
            if not near.problems:
                yield near

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"world_size {shape.world_size}, sp_size {shape.sp_size}, batch_size {shape.batch_size}, "
            f"num_generations {shape.num_generations} (dp {shape.replicas})"
        )
