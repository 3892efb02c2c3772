"""The plan of a run as text: what it computes, its memory, hours, disk and host memory."""

import statistics

from hyvideo.files.text import Row, align_columns, counted, lines_of, number
from hyvideo.planning.chain import chain_rows
from hyvideo.planning.disk import (
    checkpoint_bytes,
    disk_bytes,
    max_checkpoints,
    rank_checkpoint_bytes,
)
from hyvideo.planning.flops import count_flops
from hyvideo.planning.hardware import Hardware
from hyvideo.planning.hours import (
    WholeRun,
    forwards_per_rollout,
    iteration_flops,
    stage_seconds,
    whole_run,
)
from hyvideo.planning.memory import GIB, Memory, memory, resolve_auto
from hyvideo.planning.persistent import pinned_bytes
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sampling import Sampling

MAX_VALIDATION_SHARE = 0.2  # of a run's time, above which the plan warns
_HOUR = 3600.0  # seconds
_DAY = 24 * _HOUR
_WEEK = 7 * _DAY  # a longer run gets a warning
# Runs of the miniature on two idle CPU cores, measured: seconds of the start, of a forward pass beside
# its operations, and operations per second. Forward passes were measured for videos of 32 x 32 and
# 256 x 256 pixels; those of 64 x 64 and 128 x 128 take 15 to 25 % longer than this line.
_MINIATURE_START = 30.0
_MINIATURE_FORWARD = 0.0012
_MINIATURE_RATE = 54e9
_MINIATURE_PROMPT = 12  # tokens
_MINIATURE_SIZE = (9, 32, 32)  # frames, height and width of the videos that all miniatures know
_MAX_LARGER = 4  # times as many tokens as in these videos, above which the plan warns


def planned_run(inputs: RunInputs, device: str, hardware: Hardware) -> PlannedRun:
    """Return the plan of a run. Raises ValueError if the sizes of the transformer are unknown."""
    return PlannedRun(
        config=inputs.config.with_settings(device=device),
        world_size=inputs.world_size,
        architecture=inputs.architecture,
        hardware=hardware,
        files=inputs.files,
    )


def plan_lines(inputs: RunInputs, device: str, hardware: Hardware | None = None) -> list[str]:
    """Return the lines on cost, memory and length of a run; empty if a file for them is missing."""
    try:
        run = planned_run(inputs, device, hardware or Hardware())
        return lines_of([*cost_rows(run), *length_rows(run)])
    except ValueError:
        return []


def cost_rows(run: PlannedRun) -> list[Row]:
    """Return rows on the passes of a rollout and, on GPUs, on their operations and recomputation."""
    forwards = f"{number(forwards_per_rollout(run))} forward passes"
    if run.config.model.device == "cpu":
        return [("cost per video", forwards)]
    parameters = run.parameters.total
    rank = run.settings.lora_rank
    trained = f"a LoRA of rank {rank}" if rank else "all parameters"
    tokens = f"{run.image_tokens:,} video tokens and {run.text_tokens} text tokens"
    rows = [
        ("transformer", f"{number(parameters / 1e9)} B parameters; training {trained}"),
        ("forward pass", f"{number(run.forward.total / 1e12)} TFLOP for {tokens}"),
        ("cost per video", forwards),
        ("iteration", f"{number(iteration_flops(run) / 1e15)} PFLOP on all GPUs"),
    ]
    if run.checkpointing == "none":
        return rows
    chosen = resolve_auto(run)
    text = (
        f"{chosen.checkpointing}: {memory(chosen).needed_gib:.1f} of {run.hardware.gpu_memory:.4g} "
        "GiB"
    )
    faster = {"full": "selective", "selective": "none"}.get(chosen.checkpointing)
    if faster:
        needed = memory(run.with_settings(activation_checkpointing=faster)).needed_gib
        text += f"; {faster} is faster but needs {needed:.1f} GiB"
    rows.append(("recomputation", text))
    return rows


def length_rows(run: PlannedRun) -> list[Row]:
    """Return rows on the length of a run and, on GPUs, its disk space and host memory."""
    length = whole_run(run)
    if not run.is_timed:
        rows = [("whole run", _forward_passes(run, length)), *_size_of_miniature(run)]
    else:
        seconds = {name: time for name, time in stage_seconds(run).items() if time}
        stages = ", ".join(f"{name} {number(time)} s" for name, time in seconds.items())
        rows = [
            ("whole run", _hours(run, length)),
            (
                "",
                f"predicted, not measured, at {run.hardware.rate:g} TFLOP/s ({run.hardware.name})",
            ),
            ("seconds", stages),
        ]
        if length.seconds > _WEEK:
            rows.append(("", _warning_of_length(length)))
        if run.validation:
            rows += _validation(run, length)
    if run.config.model.device != "cpu":
        rows.append(("checkpoints", _checkpoints(run, length)))
        rows += chain_rows(run)
        rows.append(("host memory", _host_memory(run)))
        rows.append(("disk", _disk(run)))
    return rows


def steps_table(sampling: Sampling, sde_window: str) -> list[str]:
    """Return a line for each step of the rollouts: its level, the standard deviation of its noise,
    and its weight in the loss, so that a formula can be checked by eye. A window has its first
    place.
    """
    transitions = sampling.transitions()
    noisy = [index for index, step in enumerate(transitions) if step.is_stochastic]
    window = parse_window(sde_window, len(noisy))
    if window:
        noisy = window.steps(noisy, 1, lambda number_of_places: 0)
    sampler = sampler_of(sampling.sampler, sampling.reference_conventions)
    norms = {index: sampler.log_prob_grad_norm(transitions[index]) for index in noisy}
    # as `balancing_factors`, without torch, which takes seconds to import
    median = statistics.median_low(norms.values()) if norms else 0.0
    rows = [("step", "sigma", "noise std", "equalizer weight")]
    for index, (sigma, step) in enumerate(zip(sampling.levels, transitions)):
        std = step.std if index in norms else 0.0
        weight = median / (norms[index] + 1e-8) if index in norms else 0.0
        rows.append((str(index + 1), f"{sigma:.4f}", f"{std:.4f}", f"{weight:.4g}"))
    return align_columns(rows)


def memory_table(planned: Memory) -> list[str]:
    """Return a line for each item with its GiB in each phase, and a line on the peak."""
    lines = ["GiB per rank    " + "".join(f"{phase:>17}" for phase in planned.phases)]
    for item, sizes in items_in_gib(planned).items():
        if sum(sizes):
            cells = [f"{size:.2f}" if size else "-" for size in sizes]
            lines.append(f"{item:<16}" + "".join(f"{cell:>17}" for cell in cells))
    lines.append(
        f"peak            {planned.peak() / GIB:.2f} GiB in phase '{planned.peak_phase()}'"
    )
    return lines


def items_in_gib(planned: Memory) -> dict[str, list[float]]:
    """Return the rows of the table of memory: GiB in each phase, and their sums."""
    phases = planned.phases
    names = dict.fromkeys(name for phase in phases.values() for name in phase)
    items = {name: [phase.get(name, 0.0) / GIB for phase in phases.values()] for name in names}
    return items | {"sum": [planned.total(phase) / GIB for phase in phases]}


def _forward_passes(run: PlannedRun, length: WholeRun) -> str:
    """Return the length of a run whose hours cannot be predicted."""
    objective = run.config.objective
    samples = counted(run.plan.rollouts, "rollout")
    if objective.videos_from:
        samples = counted(run.plan.groups, objective.example)
    text = f"{counted(length.iterations, 'iteration')} of {samples}"
    if run.validation:
        videos = counted(length.validation_videos, "video")
        text += f" + {counted(length.validations, 'validation')} ({videos} each)"
    text += f" = {length.forwards:,.0f} forward passes, "
    if not _is_miniature(run):
        return text + "duration unknown"
    flops = count_flops(run.architecture, run.config.sampling.size, _MINIATURE_PROMPT).total
    forward = _MINIATURE_FORWARD + flops / _MINIATURE_RATE
    return f"{text}{_about(_MINIATURE_START + forward * length.forwards)} on two idle CPU cores"


def _about(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two."""
    if seconds < 60:
        return "under a minute"
    for unit, size in (("day", _DAY), ("hour", _HOUR)):
        if seconds >= 2 * size:
            return f"about {counted(round(seconds / size), unit)}"
    return f"about {counted(round(seconds / 60), 'minute')}"


def _is_miniature(run: PlannedRun) -> bool:
    return run.settings.transformer_version.startswith("miniature")


def _size_of_miniature(run: PlannedRun) -> list[Row]:
    """Return a warning if the videos of a miniature are much larger than those that it knows."""
    size = run.config.sampling.size
    if not _is_miniature(run):
        return []
    times = run.image_tokens / run.architecture.image_tokens(*_MINIATURE_SIZE)
    if times <= _MAX_LARGER:
        return []
    warning = (
        f"WARNING: {_size(size)} are {number(times)} times as many tokens as in the videos that this "
        f"model was trained on, {_size(_MINIATURE_SIZE)}. It has never seen such videos: keep this size, "
        "or choose a larger model (checkpoints-download.md)"
    )
    return [("", warning)]


def _hours(run: PlannedRun, length: WholeRun) -> str:
    """Return the terms of the length of a run, and their sum."""
    text = f"{counted(length.iterations, 'iteration')} x {length.iteration_seconds:,.0f} s"
    if run.validation:
        text += (
            f" + {counted(length.validations, 'validation')} x {length.validation_seconds:,.0f} s"
        )
        text += f" ({counted(length.validation_videos, 'video')} each)"
    days = length.seconds / _DAY
    total = f"{24 * days:.1f} h" if days < 2 else f"{days:.1f} days"
    text += f" = {total} on {counted(length.num_gpus, 'GPU')}"
    gpu_hours = f"{length.gpu_hours:,.{0 if length.gpu_hours >= 10 else 1}f}"
    return f"{text}, {gpu_hours} GPU-hours"


def _warning_of_length(length: WholeRun) -> str:
    """Return a warning with the number of iterations that fit in a week."""
    iterations = int(_WEEK / length.seconds * length.iterations)
    return (
        f"WARNING: longer than a week; lower max_steps (now {length.iterations}): a week is "
        f"{counted(iterations, 'iteration')}"
    )


def _validation(run: PlannedRun, length: WholeRun) -> list[Row]:
    """Return the share of the validations in the run, with a warning if it is large."""
    validation = run.config.validation
    share = f"{100 * length.validation_share:.0f} % of the run"
    size = _size(run.config.validation_sampling.size)
    rows = [("validation", f"{share}: {validation.validation_steps} steps for {size}")]
    if length.validation_share > MAX_VALIDATION_SHARE:
        warning = (
            f"WARNING: above {100 * MAX_VALIDATION_SHARE:.0f} %; raise validation_interval (now "
            f"{validation.validation_interval}), lower validation_steps, or validate at the size of "
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
    most = max_checkpoints(run)
    text = f"{each:.1f} GiB each, at most {most}: {each * most:,.0f} GiB"
    hours = record.save_interval * length.iteration_seconds / _HOUR
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
    return f"{before}{_gib(copied)} GiB on {node} while a checkpoint is written"


def _disk(run: PlannedRun) -> str:
    sizes = {kind: size / GIB for kind, size in disk_bytes(run).items()}
    parts = ", ".join(f"{kind} {_gib(gib)}" for kind, gib in sizes.items())
    return f"{sum(sizes.values()):,.0f} GiB in output_dir: {parts}"


def _gib(gib: float) -> str:
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.1f}"
