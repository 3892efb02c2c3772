"""Settings of step caching, which `step_cache` applies. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepCaching:
    """Flags of step caching, with the original's defaults. Steps and blocks are counted from 0."""

    cache_type: str = "deepcache"  # or "teacache", "taylorcache"
    total_steps: int = 50
    cache_start_step: int = 11  # steps before this one are full: they run all blocks
    cache_end_step: int = 45  # this step and all later ones are full
    cache_step_interval: int = 4  # distance of the full steps in between
    # deepcache: blocks that are not skipped; empty: the last one
    no_cache_block_id: Sequence[int] = ()

    def check(self, num_steps: int, num_blocks: int) -> None:
        """Raise ValueError for an invalid schedule, or one for another number of steps or
        blocks.
        """
        total = self.total_steps
        interval = self.cache_step_interval
        start, end = self.cache_start_step, self.cache_end_step
        least = int(self.cache_type == "taylorcache")  # it ignores step 0, as in the original
        if total != num_steps:
            first, last = (
                max(round(step * num_steps / max(total, end, 1)), least) for step in (start, end)
            )
            raise ValueError(
                f"--total_steps must equal the number of steps, {num_steps}, got {total}; the "
                f"default schedule is for 50 steps. Scaled: --total_steps {num_steps} "
                f"--cache_start_step {first} --cache_end_step {last}"
            )
        if not least <= start <= end <= total or interval < 1:
            raise ValueError(
                f"{least} <= --cache_start_step <= --cache_end_step <= {total} and 1 <= "
                f"--cache_step_interval must hold, got {start}, {end} and {interval}"
            )
        if self.cache_type == "deepcache" and num_blocks == 1:
            raise ValueError(
                "--cache_type deepcache needs a model of at least 2 blocks, got 1, because it "
                "skips all blocks but the last one. Use teacache or taylorcache"
            )
        if not set(self.no_cache_block_id) < set(range(num_blocks)):
            found = " ".join(map(str, self.no_cache_block_id))
            raise ValueError(
                f"--no_cache_block_id must be some of the blocks 0 to {num_blocks - 1}, got {found}"
            )

    def is_full(self, step: int) -> bool:
        """Return whether a step runs all blocks."""
        start, end = self.cache_start_step, self.cache_end_step
        return not start <= step < end or (step - start) % self.cache_step_interval == 0

    def num_skipped(self, num_blocks: int) -> int:
        """Return the number of blocks, from the first, that cached steps skip."""
        skipped = set(range(num_blocks))
        if self.cache_type == "deepcache":
            skipped -= set(self.no_cache_block_id or [num_blocks - 1])
        return max(skipped) + 1
