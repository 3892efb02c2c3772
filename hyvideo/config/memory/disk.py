"""Disk space for the checkpoints of a run: their size, their number, and the free space."""

import math
import sys
from pathlib import Path

from hyvideo.config.memory.persistent import optimizer_bytes, trained_bytes
from hyvideo.config.memory.phases import GIB
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.data.outside import free_disk, quote


def checkpoint_bytes(run: PlannedRun) -> float:
    """Return the largest size of a checkpoint in bytes: weights, optimizer state, anchor and EMA."""
    copies = 1 + run.config.needs_anchor + bool(run.settings.ema_decay)
    return run.num_shards * (copies * trained_bytes(run) + optimizer_bytes(run))


def max_checkpoints(run: PlannedRun) -> int:
    """Return the largest number of checkpoints on disk: those that are kept, and the one being written."""
    record, steps = run.config.record, run.settings.max_steps
    every = record.keep_every if record.save_total_limit else 1
    saved, kept = math.ceil(steps / record.save_interval), steps // every if every else 0
    return min(saved, record.save_total_limit + kept + 1)


def check_room(run: PlannedRun) -> None:
    """Warn on stderr if ``output_dir`` lacks space for all checkpoints. Raises ValueError if it lacks space for one."""
    folder, each = Path(run.settings.output_dir), checkpoint_bytes(run)
    free, more = free_disk(folder), max(1, max_checkpoints(run) - len(list(folder.glob("checkpoints/[0-9]*"))))
    rule = (
        f"output_dir must have room for {more} more checkpoints of {each / GIB:.1f} GiB, got {quote(folder)} with "
        f"{free / GIB:.1f} GiB free; free some space, lower save_total_limit, or use another output_dir"
    )
    if free < each:
        raise ValueError(rule)
    if free < more * each:
        print(f"WARNING: {rule}", file=sys.stderr)
