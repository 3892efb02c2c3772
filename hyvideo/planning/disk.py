"""Disk space of a run: checkpoints, videos, encoded prompts and logs, and the free space."""

import math
import sys
from pathlib import Path

from hyvideo.checkpoints.format import all_in
from hyvideo.files.files import free_disk
from hyvideo.files.text import quote
from hyvideo.planning.hours import iteration_seconds
from hyvideo.planning.memory import GIB
from hyvideo.planning.persistent import optimizer_bytes, trained_bytes
from hyvideo.planning.planned_run import PlannedRun

# of H.264 at its default quality; videos with little noise need less than half of it
_BITS_PER_PIXEL = 0.25
_LOG_BYTES = 2e4  # per iteration: metrics, TensorBoard and scores
_REPORT_BYTES = 1e7  # report.html and its pictures


def checkpoint_bytes(run: PlannedRun) -> float:
    """Return the largest size of a checkpoint in bytes: weights, optimizer state, anchor
    and EMA.
    """
    copies = 1
    if run.config.objective.needs_anchor:
        copies += 1
    if run.settings.ema_decay:
        copies += 1
    return run.num_shards * (copies * trained_bytes(run) + optimizer_bytes(run))


def rank_checkpoint_bytes(run: PlannedRun) -> float:
    """Return the bytes of a checkpoint that a rank copies and writes."""
    return checkpoint_bytes(run) / run.num_shards


def max_checkpoints(run: PlannedRun) -> int:
    """Return the largest number of checkpoints on disk: those that `CheckpointWriter` keeps, and
    the one being written.
    """
    record, steps = run.config.record, run.settings.max_steps
    most = record.save_total_limit or steps
    return min(num_saves(run), most + 1)


def num_saves(run: PlannedRun) -> int:
    """Return the largest number of checkpoints that a run writes, by ``save_interval`` and
    ``save_minutes``.
    """
    record, steps = run.config.record, run.settings.max_steps
    by_interval = math.ceil(steps / record.save_interval)
    if not record.save_minutes:
        return by_interval
    if not run.is_timed:
        return steps
    by_time = math.ceil(steps * iteration_seconds(run) / (60 * record.save_minutes))
    return min(steps, by_interval + by_time)


def disk_bytes(run: PlannedRun) -> dict[str, float]:
    """Return the bytes that a run writes to ``output_dir``, by kind."""
    sizes = {
        "checkpoints": max_checkpoints(run) * checkpoint_bytes(run),
        "encoded prompts": encoded_bytes(run),
        "videos and logs": video_bytes(run) + _REPORT_BYTES + run.settings.max_steps * _LOG_BYTES,
    }
    return {kind: size for kind, size in sizes.items() if size}


def video_bytes(run: PlannedRun) -> float:
    """Return the bytes of the saved videos of rollouts and validations."""
    record, config = run.config.record, run.config
    iterations = (
        run.settings.max_steps // record.log_video_interval if record.log_video_interval else 0
    )
    pixels = iterations * math.prod(config.sampling.size) + run.num_validations * math.prod(
        config.validation_sampling.size
    )
    return record.log_num_videos * pixels * _BITS_PER_PIXEL / 8


def encoded_bytes(run: PlannedRun) -> float:
    """Return the bytes of the encoded prompts; 0 if they are not saved in ``output_dir``."""
    if not run.settings.precompute_conditions or run.settings.conditions_dir:
        return 0.0
    return run.num_prompts * run.text_tokens * run.architecture.text_width * run.compute_bytes


def check_room(run: PlannedRun) -> None:
    """Warn on stderr if ``output_dir`` lacks space for the whole run.

    Raises ValueError if it lacks space for one checkpoint and the encoded prompts. Videos and logs
    only grow over the run, and training continues without them if the disk is full.
    """
    folder = Path(run.settings.output_dir)
    each = checkpoint_bytes(run)
    free = free_disk(folder)
    present = len(all_in(folder))
    more = max(1, max_checkpoints(run) - present)
    others = sum(size for kind, size in disk_bytes(run).items() if kind != "checkpoints")
    rule = (
        f"output_dir must have room for {more} more checkpoints of {each / GIB:.1f} GiB and "
        f"{others / GIB:.1f} GiB of videos, encoded prompts and logs, "
        f"{(more * each + others) / GIB:.1f} GiB in all, got {quote(folder)} with {free / GIB:.1f} "
        f"GiB free; free some space, lower save_total_limit (now {run.settings.save_total_limit}), "
        "or use another output_dir"
    )
    if free < each + encoded_bytes(run):
        raise ValueError(rule)
    if free < more * each + others:
        print(f"WARNING: {rule}", file=sys.stderr)
