"""Rows on the length, disk space and host memory of the whole run, and on the cost of a rollout."""

from dataclasses import replace

from hyvideo.data.text import Row, counted, lines_of
from hyvideo.planning.cost import duration, forwards_per_rollout
from hyvideo.planning.disk import (
    checkpoint_bytes,
    disk_bytes,
    max_checkpoints,
    rank_checkpoint_bytes,
)
from hyvideo.planning.hardware import SLOWER, Hardware
from hyvideo.planning.memory import GIB, memory, resolve_auto
from hyvideo.planning.persistent import pinned_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.whole_run import WholeRun, slower_hardware, whole_run
from hyvideo.settings.run_inputs import RunInputs

_H100 = Hardware()
MAX_VALIDATION_SHARE = 0.2  # of a run's time, above which the plan warns
_DAY = 86400.0  # seconds
_WEEK = 7 * _DAY  # a longer run gets a warning
# Runs of the miniature on two idle CPU cores, measured: seconds of the start, and of a forward
# pass.
_MINIATURE_START = 30.0
_MINIATURE_FORWARD = 0.0024


def start_lines(inputs: RunInputs, device: str, hardware: Hardware = _H100) -> list[str]:
    """Return lines on cost, checkpointing, length and checkpoints of a run; empty if a file for
    them is missing.
    """
    try:
        run = planned_run(inputs, device, hardware)
        return lines_of(start_rows(run) + length_rows(run))
    except ValueError:
        return []


def planned_run(inputs: RunInputs, device: str, hardware: Hardware) -> PlannedRun:
    """Return the plan of a run. Raises ValueError if the sizes of the transformer are unknown."""
    return PlannedRun(
        config=inputs.config.with_settings(device=device),
        world_size=inputs.world_size,
        architecture=inputs.architecture,
        hardware=hardware,
        files=inputs.files,
    )


def start_rows(run: PlannedRun) -> list[Row]:
    """Return rows on the cost of a rollout and, on GPUs, on the recomputation of activations."""
    rows = [("cost per rollout", f"{forwards_per_rollout(run):.4g} forward passes")]
    if run.config.model.device == "cpu" or run.checkpointing == "none":
        return rows
    chosen = resolve_auto(run)
    text = (
        f"{chosen.checkpointing}: {memory(chosen).needed_gib:.1f} of {run.hardware.gpu_memory:.4g} "
        "GiB"
    )
    if chosen.checkpointing == "full":
        selective = run.with_settings(activation_checkpointing="selective")
        text += f"; selective is faster but needs {memory(selective).needed_gib:.1f} GiB"
    rows.append(("recomputation", text))
    return rows


def length_rows(run: PlannedRun) -> list[Row]:
    """Return rows on the length of a run, its disk space and host memory: hours of a released model
    on GPUs, else forward passes.
    """
    length = whole_run(run)
    if not run.is_timed:
        return [("whole run", _forward_passes(run, length))]
    rows = [("whole run", _hours(run, length)), ("", _assumptions(run, length))]
    if length.seconds > _WEEK:
        rows.append(("", _warning_of_length(length)))
    if run.validation:
        rows += _validation(run, length)
    if run.plan.replicas > 1:
        text = (
            f"more rollouts per iteration ({run.plan.rollouts} on {run.world_size}), not a shorter "
            "run: that needs a lower max_steps"
        )
        rows.append(("more GPUs", text))
    rows.append(("checkpoints", _checkpoints(run, length)))
    rows.append(("host memory", _host_memory(run)))
    rows.append(("disk", _disk(run)))
    return rows


def _forward_passes(run: PlannedRun, length: WholeRun) -> str:
    """Return the length of a run whose hours cannot be predicted."""
    text = f"{counted(length.iterations, 'iteration')} of {counted(run.plan.rollouts, 'rollout')}"
    if run.validation:
        videos = counted(length.validation_videos, "video")
        text += f" + {counted(length.validations, 'validation')} ({videos} each)"
    text += f" = {length.forwards:,.0f} forward passes, "
    if not run.settings.transformer_version.startswith("miniature"):
        return text + "duration unknown"
    minutes = (_MINIATURE_START + _MINIATURE_FORWARD * length.forwards) / 60
    about = "under a minute" if minutes < 1 else f"about {counted(round(minutes), 'minute')}"
    return f"{text}{about} on two idle CPU cores"


def _hours(run: PlannedRun, length: WholeRun) -> str:
    """Return the terms of the length of a run, and their sum."""
    text = f"{counted(length.iterations, 'iteration')} x {length.iteration_seconds:,.0f} s"
    if run.validation:
        text += (
            f" + {counted(length.validations, 'validation')} x {length.validation_seconds:,.0f} s"
        )
        text += f" ({counted(length.validation_videos, 'video')} each)"
    if length.saves:
        text += f" + {counted(length.saves, 'checkpoint')} x {length.save_seconds:.0f} s"
    if length.compilation_seconds:
        text += f" + {length.compilation_seconds:.0f} s of compilation"
    text += f" = {_in_hours_or_days(length.seconds)} on {counted(length.num_gpus, 'GPU')}"
    text += f", {length.gpu_hours:,.0f} GPU-hours"
    if run.hardware.name == "H100":  # also assumed for an unknown GPU, which may be slower
        slower = whole_run(replace(run, hardware=slower_hardware(run.hardware)))
        text += f"; {_in_hours_or_days(slower.seconds)} at {SLOWER.rate:g} TFLOP/s (A100)"
    return text


def _in_hours_or_days(seconds: float) -> str:
    days = seconds / _DAY
    return f"{24 * days:.1f} h" if days < 2 else f"{days:.1f} days"


def _assumptions(run: PlannedRun, length: WholeRun) -> str:
    """Return the rates for which the hours are predicted."""
    hardware = run.hardware
    name = f" ({hardware.name})" if hardware.name else ""
    exposed = 100 * duration(run).waiting / length.iteration_seconds
    return (
        f"predicted (not measured) at {hardware.rate:g} TFLOP/s per GPU in matrix products{name}, "
        f"{hardware.memory_rate:.2g} TB/s of its memory, {hardware.link:g} GB/s within a node and "
        f"{hardware.network:g} GB/s per GPU between nodes; {exposed:.1f}% exposed communication"
    )


def _warning_of_length(length: WholeRun) -> str:
    """Return a warning with the number of iterations that fit in a week."""
    compiled = length.compilation_seconds  # once, however long the run is
    iterations = int((_WEEK - compiled) / (length.seconds - compiled) * length.iterations)
    return (
        f"WARNING: longer than a week; lower max_steps (now {length.iterations}): a week is "
        f"{counted(iterations, 'iteration')}"
    )


def _validation(run: PlannedRun, length: WholeRun) -> list[Row]:
    """Return the share of the validations in the run, with a warning if it is large."""
    record = run.config.record
    share = f"{100 * length.validation_share:.0f} % of the run"
    rows = [
        (
            "validation",
            f"{share}: {record.validation_steps} steps for {_size(run.config.validation_sampling.size)}",
        )
    ]
    if length.validation_share > MAX_VALIDATION_SHARE:
        warning = (
            f"WARNING: above {100 * MAX_VALIDATION_SHARE:.0f} %; raise validation_interval (now "
            f"{record.validation_interval}), lower validation_steps, or validate at the size of "
            f"the rollouts, {_size(run.config.sampling.size)}"
        )
        rows.append(("", warning))
    return rows


def _size(size: tuple[int, int, int]) -> str:
    frames, height, width = size
    return f"{frames} frames of {height} x {width}"


def _checkpoints(run: PlannedRun, length: WholeRun) -> str:
    """Return the size of all checkpoints, and what a crash loses if it is more than an hour."""
    record = run.config.record
    each = checkpoint_bytes(run) / GIB
    number = max_checkpoints(run)
    text = f"{each:.1f} GiB each, at most {number}: {each * number:,.0f} GiB"
    hours = record.save_interval * length.iteration_seconds / 3600
    if hours > 1 and not record.save_minutes:
        text += f"; a crash loses up to {hours:.1f} h (1 h + 1 iteration with --save_minutes 60)"
    return text


def _host_memory(run: PlannedRun) -> str:
    """Return the pinned memory of a node, if any, and that of the copy from which a checkpoint is
    written.
    """
    num_local = min(run.world_size, run.hardware.gpus_per_node)
    pinned = [f"{item} {_gib(num_local * size / GIB)}" for item, size in pinned_bytes(run).items()]
    before = f"{', '.join(pinned)} GiB per node, pinned; " if pinned else ""
    copied = min(num_local, run.num_shards) * rank_checkpoint_bytes(run) / GIB
    node = "each node" if run.world_size > run.hardware.gpus_per_node else "the node"
    return f"{before}{copied:.0f} GiB on {node} while a checkpoint is written"


def _disk(run: PlannedRun) -> str:
    sizes = {kind: size / GIB for kind, size in disk_bytes(run).items()}
    parts = ", ".join(f"{kind} {_gib(gib)}" for kind, gib in sizes.items())
    return f"{sum(sizes.values()):,.0f} GiB in output_dir: {parts}"


def _gib(gib: float) -> str:
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.1f}"
