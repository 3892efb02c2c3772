"""The plan in words: memory by phase, cost, legal combinations, and one line of advice."""

from dataclasses import replace
from itertools import islice

from hyvideo.config.memory.advice import cheapest_change
from hyvideo.config.memory.cost import cost, seconds
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.persistent import anchor_bytes
from hyvideo.config.memory.phases import GIB, Memory
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.run_shape import RunShape

_COMBINATIONS = 12
_TABLE_WORLDS, _TABLE_SP_SIZES = (8, 16, 64), (1, 2, 4, 8)


def report(run: PlannedRun, *, gpu_memory: float, rate: float) -> str:
    """Everything about one run; ``gpu_memory`` in GiB, ``rate`` in TFLOP/s that a GPU reaches."""
    parts = [
        run_lines(run.shape, run.architecture),
        memory_lines(run.memory),
        [] if run.problems else cost_lines(run.shape, run.architecture, rate),
        combination_lines(run, gpu_memory, rate),
        [verdict(run, gpu_memory)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def run_lines(shape: RunShape, architecture: Architecture) -> list[str]:
    """Lines about the model, the video, the ranks and the anchor."""
    tokens = architecture.image_tokens(shape.frames, shape.height, shape.width)
    sharding = f"FSDP over {shape.num_shards}" if shape.enable_fsdp else "no sharding"
    trained = f"LoRA of rank {shape.lora_rank}" if shape.lora_rank else "all parameters"
    lines = [
        f"transformer      {architecture.parameters / 1e9:.3f} B parameters, {architecture.num_layers} blocks of width "
        f"{architecture.width}; {trained} trained",
        f"video            {shape.frames} frames of {shape.height} x {shape.width} = {tokens:,} tokens, "
        f"{shape.text_tokens} of text",
        f"ranks            {shape.world_size} = {shape.replicas} replicas x sp_size {shape.sp_size}, {sharding}, "
        f"activation checkpointing {shape.activation_checkpointing}",
    ]
    if shape.has_anchor and shape.reference_mode_offload:
        held = anchor_bytes(shape, architecture) / GIB
        lines.append(f"anchor           {held:.2f} GiB on the CPU for each rank")
    return lines


def memory_lines(counted: Memory) -> list[str]:
    """GiB of each item in each phase, the sum, and the peak."""
    phases = list(counted.phases)
    names = list(dict.fromkeys(name for phase in phases for name in counted.items(phase)))
    lines = ["GiB per rank    " + "".join(f"{phase:>17}" for phase in phases)]
    for name in names:
        sizes = [counted.items(phase).get(name, 0.0) for phase in phases]
        if any(sizes):
            lines.append(f"{name:<16}" + "".join(f"{_gib(size):>17}" for size in sizes))
    totals = [counted.total(phase) for phase in phases]
    lines.append(f"{'sum':<16}" + "".join(f"{_gib(size):>17}" for size in totals))
    peak = counted.peak_phase()
    lines.append(f"peak            {_gib(counted.peak())} GiB, in the phase '{peak}'")
    return lines


def cost_lines(shape: RunShape, architecture: Architecture, rate: float) -> list[str]:
    """FLOPs of a forward, a rollout and an iteration, and the seconds of an iteration."""
    spent = cost(shape, architecture)
    forward = spent.forward
    duration = seconds(shape, architecture, rate)
    share = forward.attention / forward.total
    return [
        f"forward          {_number(forward.total / 1e12)} TFLOP, {share:.0%} of it attention",
        f"rollout          {_number(spent.forwards_per_rollout)} forward-equivalents "
        f"({shape.grpo_sampling_steps} steps, {shape.trained_steps} trained, {shape.num_branches} branches), "
        f"decoding {_number(spent.decode_flops / 1e15)} PFLOP",
        f"iteration        {spent.rollouts} rollouts, {_number(spent.flops / 1e15)} PFLOP, {_number(duration)} s at "
        f"{rate:g} TFLOP/s per GPU, without rewards and communication",
    ]


def combination_lines(run: PlannedRun, gpu_memory: float, rate: float) -> list[str]:
    """Lines of the legal combinations, nearest first, with what each takes."""
    lines = ["legal near it     world   sp   dp  batch_size  num_generations   GiB  fits  s/iteration  s/rollout"]
    for near in islice(run.legal_near(), _COMBINATIONS):
        shape, duration = near.shape, seconds(near.shape, near.architecture, rate)
        rollouts = shape.replicas * shape.rollouts_per_replica
        fits = "yes" if near.memory.fits(gpu_memory) else "no"
        lines.append(
            f"                {shape.world_size:>7} {shape.sp_size:>4} {shape.replicas:>4} {shape.batch_size:>11} "
            f"{shape.num_generations:>16} {near.memory.peak() / GIB:>5.1f} {fits:>5} "
            f"{_number(duration):>12} {_number(duration / rollouts):>10}"
        )
    return lines if len(lines) > 1 else ["legal near it    nothing"]


def verdict(run: PlannedRun, gpu_memory: float) -> str:
    """One line: that the run fits, or what to change."""
    if run.problems:
        near = list(run.legal_near())
        fitting = [other for other in near if other.memory.fits(gpu_memory)]
        suffix = f"nearest legal combination{' that fits' if fitting else ''}: {(fitting or near)[0]}" if near else ""
        return f"illegal: {run.problems[0]}; {suffix or 'none near'}"
    gpus, size = run.world_size, f"{run.memory.needed_gib:.1f} of {gpu_memory:g} GiB with what is not counted"
    if run.memory.fits(gpu_memory):
        return f"fits: {size}"
    change = cheapest_change(run, gpu_memory)
    if change is None:
        return f"too large: {size}; no known change makes it fit {gpus} GPUs: take more GPUs or smaller videos"
    flags = " ".join(f"--{name} {str(value).lower()}" for name, value in change.items())
    after = run.with_settings(**change).memory.needed_gib
    return f"too large: {size}; the cheapest change that makes it fit: {flags} ({after:.1f} GiB)"


def memory_table(run: PlannedRun) -> str:
    """A Markdown table of the peak in GiB over numbers of GPUs and sp_size, legal or not."""
    rows = ["| GPUs | " + " | ".join(f"sp {sp_size}" for sp_size in _TABLE_SP_SIZES) + " |"]
    rows.append("|" + "---|" * (1 + len(_TABLE_SP_SIZES)))
    for world_size in _TABLE_WORLDS:
        runs = (replace(run.with_settings(sp_size=sp_size), world_size=world_size) for sp_size in _TABLE_SP_SIZES)
        rows.append(f"| {world_size} | " + " | ".join(f"{other.memory.peak() / GIB:.1f}" for other in runs) + " |")
    return "\n".join(rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
