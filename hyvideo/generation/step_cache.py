"""Step caching in generate.py: at cached steps, the tokens of earlier steps replace the output of
most or all blocks, by diffusers' hooks on the blocks.

Kinds and schedule are the original's, whose program stores the tokens after every block. Only those
after the last skipped block are needed, and they are all that is stored here. The caches of
diffusers have other schedules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from hyvideo.generation.step_caching import StepCaching
from hyvideo.models.family import blocks

_HOOK = "step cache"


@contextmanager
def step_cache(
    transformer: nn.Module, caching: StepCaching, num_rows: int = 1
) -> Iterator["StepCache"]:
    """Skip blocks of a transformer within the context, while it samples one video.

    Each step makes ``num_rows`` forward passes, the branches of guidance. A block is called as
    ``block(image tokens, text tokens, ...)`` and returns image tokens, or both.
    """
    layers = blocks(transformer)
    num_skipped = caching.num_skipped(len(layers))
    cache = StepCache(caching, num_rows)
    passes = transformer.register_forward_pre_hook(lambda *_: cache.next_pass())
    registries = [
        HookRegistry.check_if_exists_or_initialize(block) for block in layers[:num_skipped]
    ]
    for registry in registries:
        registry.register_hook(_SkippedBlock(cache, registry is registries[-1]), _HOOK)
    try:
        yield cache
    finally:
        passes.remove()
        for registry in registries:
            registry.remove_hook(_HOOK, recurse=False)


class _SkippedBlock(ModelHook):
    """A block that cached steps skip; the last one returns the cached tokens in place of all."""

    def __init__(self, cache: "StepCache", is_last: bool):
        super().__init__()
        self.cache = cache
        self.is_last = is_last

    def new_forward(self, block: nn.Module, image: Tensor, text: Tensor, *others: Any):
        cache = self.cache
        if cache.settings.is_full(cache.step):
            output = self.fn_ref.original_forward(image, text, *others)
            if self.is_last:
                cache.keep(output)
            return output
        if self.is_last:
            return cache.predicted()
        return (image, text) if cache.has_text else image


@dataclass
class StepCache:
    """Tokens after the last skipped block, of one video, on each rank its own."""

    settings: StepCaching
    num_rows: int
    num_passes: int = 0  # that have begun
    has_text: bool = False  # whether a block returns text tokens, too
    # By row: step, text tokens, and image tokens; for taylorcache also their first and second
    # difference per step.
    stored: dict[int, tuple[int, Tensor | None, list[Tensor]]] = field(default_factory=dict)

    def next_pass(self) -> None:
        self.num_passes += 1

    @property
    def step(self) -> int:
        return (self.num_passes - 1) // self.num_rows

    @property
    def row(self) -> int:
        return (self.num_passes - 1) % self.num_rows

    def predicted(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output of the last skipped block at a cached step."""
        step, text, [*lower, image] = self.stored[self.row]
        for order in range(len(lower), 0, -1):  # Taylor series by Horner's rule
            image = torch.add(lower[order - 1], image, alpha=(self.step - step) / order)
        return (image, text) if self.has_text else image

    def keep(self, output: Tensor | tuple[Tensor, Tensor]) -> None:
        """Store the output of the last skipped block at a full step."""
        self.has_text = isinstance(output, tuple)
        image, text = output if self.has_text else (output, None)
        is_taylor = self.settings.cache_type == "taylorcache"
        if is_taylor and self.step == 0:
            return
        values = [image]
        if is_taylor and self.row in self.stored:
            step, _, old = self.stored[self.row]
            for value in old[:2]:
                values.append((values[-1] - value) / (self.step - step))
        self.stored[self.row] = self.step, text, values
