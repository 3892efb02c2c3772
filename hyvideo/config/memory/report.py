"""The plan in words: memory by phase, cost, legal combinations, and one line of advice."""

from dataclasses import replace
from itertools import islice

from hyvideo.config.memory.advice import cheapest_change, fastest_change
from hyvideo.config.memory.cost import cost, duration
from hyvideo.config.memory.disk import checkpoint_lines
from hyvideo.config.memory.network import traffic
from hyvideo.config.memory.persistent import anchor_bytes
from hyvideo.config.memory.phases import GIB, Memory, memory, settled
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.whole_run import length_lines

_COMBINATIONS = 12
_TABLE_WORLDS, _TABLE_SP_SIZES = (8, 16, 64), (1, 2, 4, 8)


def report(run: PlannedRun) -> str:
    """Everything about one run."""
    parts = [
        run_lines(run),
        memory_lines(memory(run)),
        [] if run.problems else cost_lines(run),
        combination_lines(run),
        [] if run.problems else fastest_lines(run),
        [verdict(run)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def run_lines(run: PlannedRun) -> list[str]:
    """Lines about the model, the video, the ranks and the anchor."""
    model, settings = run.architecture, run.settings
    frames, height, width = run.config.rollout_size
    sharding = f"FSDP over {run.num_shards}" if settings.enable_fsdp else "no sharding"
    trained = f"LoRA of rank {settings.lora_rank}" if settings.lora_rank else "all parameters"
    lines = [
        f"transformer      {model.parameters / 1e9:.3f} B parameters, {model.num_layers} blocks of width "
        f"{model.width}; {trained} trained",
        f"video            {frames} frames of {height} x {width} = {run.image_tokens:,} tokens, "
        f"{run.text_tokens} of text",
        f"ranks            {run.world_size} = {run.replicas} replicas x sp_size {settings.sp_size}, {sharding}, "
        f"activation checkpointing {settled(run).checkpointing}",
    ]
    if run.config.needs_anchor and settings.reference_mode_offload:
        lines.append(f"anchor           {anchor_bytes(run) / GIB:.2f} GiB on the CPU for each rank")
    return lines


def memory_lines(counted: Memory) -> list[str]:
    """GiB of each item in each phase, the sum, and the peak."""
    phases = counted.phases
    lines = ["GiB per rank    " + "".join(f"{phase:>17}" for phase in phases)]
    for name in dict.fromkeys(name for items in phases.values() for name in items):
        sizes = [items.get(name, 0.0) for items in phases.values()]
        if any(sizes):
            lines.append(f"{name:<16}" + "".join(f"{_gib(size):>17}" for size in sizes))
    lines.append(f"{'sum':<16}" + "".join(f"{_gib(counted.total(phase)):>17}" for phase in phases))
    lines.append(f"peak            {_gib(counted.peak())} GiB, in the phase '{counted.peak_phase()}'")
    return lines


def cost_lines(run: PlannedRun) -> list[str]:
    """FLOPs of a forward, a rollout and an iteration, its messages and seconds, and the length of the run."""
    spent, sent, time, hardware = cost(run), traffic(run), duration(run), run.hardware
    forward = spent.forward
    return [
        f"forward          {_number(forward.total / 1e12)} TFLOP, {forward.attention / forward.total:.0%} of it "
        "attention",
        f"rollout          {_number(spent.forwards_per_rollout)} forward-equivalents "
        f"({run.settings.grpo_sampling_steps} steps, {run.num_trained_steps} trained, {run.config.num_branches} "
        f"branches), decoding and scoring {_number(spent.video_flops / 1e15)} PFLOP",
        f"iteration        {spent.rollouts} rollouts, {_number(spent.flops / 1e15)} PFLOP: {_number(time.computing)} s "
        f"at {hardware.rate:g} TFLOP/s per GPU + {_number(time.waiting)} s for communication",
        f"communication    {_number(sent.received / 1e12)} TB to each GPU, {_number(sent.from_other_nodes / 1e12)} TB "
        f"from other nodes: {_number(time.network)} s, {_number(time.network - time.waiting)} s of it beside computing",
        *length_lines(run),
        *checkpoint_lines(run),
    ]


def combination_lines(run: PlannedRun) -> list[str]:
    """Lines of the legal combinations, nearest first, with what each takes."""
    lines = ["legal near it     world   sp   dp  batch_size  num_generations   GiB  fits  s/iteration  s/rollout"]
    for near in islice(run.legal_near(), _COMBINATIONS):
        settings, counted, seconds = near.settings, memory(near), duration(near).total
        lines.append(
            f"                {near.world_size:>7} {settings.sp_size:>4} {near.replicas:>4} {settings.batch_size:>11} "
            f"{settings.num_generations:>16} {counted.peak() / GIB:>5.1f} "
            f"{'yes' if counted.fits(run.hardware.gpu_memory) else 'no':>5} "
            f"{_number(seconds):>12} {_number(seconds / (near.replicas * near.rollouts_per_replica)):>10}"
        )
    return lines if len(lines) > 1 else ["legal near it    nothing"]


def fastest_lines(run: PlannedRun) -> list[str]:
    """A line with the sharding, recomputation, conditions and batching that are fastest here, if any fit."""
    change = fastest_change(run)
    if change is None:
        return []
    best = run.with_settings(**change)
    before, after = (f"{_number(duration(r).total)} s, {memory(r).needed_gib:.1f} GiB" for r in (run, best))
    words = f"{flags(change)} ({after} instead of {before})" if change else "as it is"
    return [f"fastest          {words}"]


def flags(change: dict) -> str:
    """Settings as a command line has them."""
    return " ".join(f"--{name} {str(value).lower()}" for name, value in change.items())


def verdict(run: PlannedRun) -> str:
    """One line: that the run fits, or what to change."""
    gpu_memory = run.hardware.gpu_memory
    if run.problems:
        near = list(run.legal_near())
        fitting = [other for other in near if memory(other).fits(gpu_memory)]
        suffix = f"nearest legal combination{' that fits' if fitting else ''}: {(fitting or near)[0]}" if near else ""
        return f"illegal: {run.problems[0]}; {suffix or 'none near'}"
    gpus, counted = run.world_size, memory(run)
    size = f"{counted.needed_gib:.1f} of {gpu_memory:g} GiB with what is not counted"
    if counted.fits(gpu_memory):
        return f"fits: {size}"
    change = cheapest_change(run)
    if change is None:
        return f"too large: {size}; no known change makes it fit {gpus} GPUs: take more GPUs or smaller videos"
    after = memory(run.with_settings(**change)).needed_gib
    return f"too large: {size}; the cheapest change that makes it fit: {flags(change)} ({after:.1f} GiB)"


def memory_table(run: PlannedRun) -> str:
    """A Markdown table of the peak in GiB over numbers of GPUs and sp_size, legal or not."""
    rows = ["| GPUs | " + " | ".join(f"sp {sp_size}" for sp_size in _TABLE_SP_SIZES) + " |"]
    rows.append("|" + "---|" * (1 + len(_TABLE_SP_SIZES)))
    for world_size in _TABLE_WORLDS:
        runs = (replace(run.with_settings(sp_size=sp_size), world_size=world_size) for sp_size in _TABLE_SP_SIZES)
        rows.append(f"| {world_size} | " + " | ".join(f"{memory(other).peak() / GIB:.1f}" for other in runs) + " |")
    return "\n".join(rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
