"""The planner's report: memory by phase, cost, and one line of advice."""

import shlex

from hyvideo.data.text import Row, lines_of, number
from hyvideo.planning.advice import cheapest_change, fastest_change
from hyvideo.planning.cost import (
    decode_flops,
    duration,
    forward_rate,
    forwards_per_rollout,
    iteration_flops,
    scoring_flops,
)
from hyvideo.planning.length_text import length_rows
from hyvideo.planning.memory import GIB, Memory, memory, resolve_auto
from hyvideo.planning.network import traffic
from hyvideo.planning.planned_run import PlannedRun


def report(run: PlannedRun, words: list[str]) -> str:
    """Return the report of a run with the flags ``words``; without times if the run is illegal."""
    lines = lines_of([model_row(run), video_row(run), ranks_row(run)])
    lines += ["", *memory_table(memory(run))]
    if not run.problems:
        lines += lines_of([*cost_rows(run), *length_rows(run)])
        lines.append("")
    return "\n".join([*lines, *recommendation(run, words)])


def recommendation(run: PlannedRun, words: list[str]) -> list[str]:
    """Return lines with one command, that of the fastest run with the flags ``words`` that fits,
    and on whether the run fits without a change.
    """
    line, change = verdict(run)
    best = None if run.problems else fastest_change(run)
    if best is None and change is None:
        return [line]
    if best is None:  # only a change of the trained weights or their precision fits
        best = change
    elif change:
        line = f"too large: {_size(run)}; the command above fits"
    rows = [("command", training_command(run, words, best))]
    if best:
        before, after = (
            f"{number(duration(each).total)} s per iteration and {memory(each).needed_gib:.1f} GiB"
            for each in (run, run.with_settings(**best))
        )
        rows.append(("", f"{after}; without {flags(best)}: {before}"))
    return [*lines_of(rows), line]


def model_row(run: PlannedRun) -> Row:
    model = run.architecture
    rank = run.settings.lora_rank
    trained = f"a LoRA of rank {rank}" if rank else "all parameters"
    parameters = f"{model.parameters / 1e9:.3f} B parameters"
    return (
        "transformer",
        f"{parameters}, {model.num_layers} blocks of width {model.width}; training {trained}",
    )


def video_row(run: PlannedRun) -> Row:
    frames, height, width = run.config.sampling.size
    tokens = f"{run.image_tokens:,} video tokens, {run.text_tokens} text tokens"
    return "video", f"{frames} frames of {height} x {width} = {tokens}"


def ranks_row(run: PlannedRun) -> Row:
    sharding = f"FSDP over {run.num_shards} ranks" if run.settings.enable_fsdp else "no sharding"
    layout = f"{run.world_size} = {run.plan.replicas} replicas x sp_size {run.settings.sp_size}"
    return (
        "ranks",
        f"{layout}, {sharding}, activation checkpointing {resolve_auto(run).checkpointing}",
    )


def memory_table(counted: Memory) -> list[str]:
    """Return a line for each item with its GiB in each phase, and a line on the peak."""
    names = "".join(f"{phase:>17}" for phase in counted.phases)
    lines = [f"GiB per rank    {names}"]
    for item, sizes in items_in_gib(counted).items():
        if sum(sizes):
            cells = [f"{size:.2f}" if size else "-" for size in sizes]
            lines.append(f"{item:<16}" + "".join(f"{cell:>17}" for cell in cells))
    lines.append(
        f"peak            {counted.peak() / GIB:.2f} GiB in phase '{counted.peak_phase()}'"
    )
    return lines


def cost_rows(run: PlannedRun) -> list[Row]:
    """Return the operations, seconds and messages of an iteration."""
    forward = run.architecture.forward(run.image_tokens, run.text_tokens)
    messages = traffic(run)
    time = duration(run)
    rate = f"{number(forward_rate(run) / 1e12)} TFLOP/s per GPU"
    attention = f"{100 * forward.attention / forward.total:.0f}% in attention"
    steps = (
        f"{run.settings.grpo_sampling_steps} steps, {run.plan.num_trained_steps} trained, "
        f"{run.plan.sampled_branches:.3g} branches"
    )
    per_video = decode_flops(run) + scoring_flops(run)
    rollout = f"{number(forwards_per_rollout(run))} forward passes ({steps})"
    iteration = f"{run.plan.rollouts} rollouts, {number(iteration_flops(run) / 1e15)} PFLOP"
    seconds = f"{number(time.total)} s, of which {number(time.waiting)} s exposed communication"
    rows = [
        ("forward pass", f"{number(forward.total / 1e12)} TFLOP, {attention}; {rate}"),
        ("rollout", f"{rollout}, {number(per_video / 1e15)} PFLOP to decode and score"),
        ("iteration", f"{iteration}: {seconds}"),
        ("", _seconds_by_name(time.stages)),
    ]
    overheads = {name: seconds for name, seconds in time.overheads.items() if seconds}
    if overheads:
        rows.append(("including", _seconds_by_name(overheads)))
    sent = (
        f"{number(messages.received / 1e12)} TB per GPU, "
        f"{number(messages.from_other_nodes / 1e12)} TB per GPU from other nodes"
    )
    rows.append(("communication", f"{sent}: {number(time.network)} s"))
    return rows


def _seconds_by_name(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {number(value)} s" for name, value in seconds.items())


def items_in_gib(counted: Memory) -> dict[str, list[float]]:
    """Return the rows of the table of memory: GiB in each phase, and their sums."""
    names = dict.fromkeys(name for phase in counted.phases.values() for name in phase)
    items = {
        name: [phase.get(name, 0.0) / GIB for phase in counted.phases.values()] for name in names
    }
    return items | {"sum": [counted.total(phase) / GIB for phase in counted.phases]}


def training_command(run: PlannedRun, words: list[str], change: dict) -> str:
    """Return the command of a run with the flags ``words`` and a change; a timed run also saves
    every hour.
    """
    if run.world_size > run.hardware.gpus_per_node:
        program = "bash run_post_train_multinode.sh"
    else:
        program = f"NPROC={run.world_size} bash run_post_train.sh"
    if run.is_timed and not run.settings.save_minutes:
        change = change | {"save_minutes": 60}
    return command(program, words, change)


def command(program: str, words: list[str], change: dict) -> str:
    """Return a command line in which the flags of ``change`` replace those in ``words``."""
    kept = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):  # else a value, which is kept or replaced like its flag
            is_replaced = word.removeprefix("--").partition("=")[0] in change
        if not is_replaced:
            kept.append(word)
    return " ".join(part for part in (program, shlex.join(kept), flags(change)) if part)


def flags(change: dict) -> str:
    """Return settings as flags of a command line."""
    return " ".join(f"--{name} {str(value).lower()}" for name, value in change.items())


def verdict(run: PlannedRun) -> tuple[str, dict | None]:
    """Return a line on whether the run fits and what to change, and the change: empty if it fits,
    None if unknown.
    """
    if run.problems:
        return f"illegal: {run.problems[0]}", None
    size = _size(run)
    if memory(run).fits(run.hardware.gpu_memory):
        return f"fits: {size}", {}
    change = cheapest_change(run)
    if change is None:
        return (
            f"too large: {size}; no known change makes it fit; use more GPUs or smaller videos",
            None,
        )
    after = memory(run.with_settings(**change)).needed_gib
    return (
        f"too large: {size}; the cheapest change that makes it fit: {flags(change)} ({after:.1f} "
        "GiB)",
        change,
    )


def _size(run: PlannedRun) -> str:
    return (
        f"{memory(run).needed_gib:.1f} of {run.hardware.gpu_memory:g} GiB, including CUDA context "
        "and fragmentation"
    )
