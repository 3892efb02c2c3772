"""The plan in words: memory by phase, cost, legal combinations, and one line of advice."""

from dataclasses import replace
from itertools import islice

from hyvideo.config.memory.advice import cheapest_change, fastest_change
from hyvideo.config.memory.cost import cost, duration
from hyvideo.config.memory.disk import checkpoint_lines
from hyvideo.config.memory.network import traffic
from hyvideo.config.memory.persistent import trained_bytes
from hyvideo.config.memory.phases import GIB, Memory, memory, settled
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.config.memory.whole_run import length_lines
from hyvideo.config.run_plan import labelled

_NEAREST = 12
_TABLE_WORLDS, _TABLE_SP_SIZES = (8, 16, 64), (1, 2, 4, 8)


def report(run: PlannedRun) -> str:
    """Everything about one run."""
    of_time = [] if run.problems else [cost_lines(run)]
    parts = [run_lines(run), memory_lines(memory(run)), *of_time, near_lines(run), [verdict(run)]]
    return "\n\n".join("\n".join(lines) for lines in parts)


def run_lines(run: PlannedRun) -> list[str]:
    """Lines about the model, the video, the ranks and the anchor."""
    model, settings = run.architecture, run.settings
    frames, height, width = run.config.rollout_size
    sharding = f"FSDP over {run.num_shards}" if settings.enable_fsdp else "no sharding"
    trained = f"LoRA of rank {settings.lora_rank}" if settings.lora_rank else "all parameters"
    lines = [
        f"transformer            {model.parameters / 1e9:.3f} B parameters, {model.num_layers} blocks of width "
        f"{model.width}; {trained} trained",
        f"video                  {frames} frames of {height} x {width} = {run.image_tokens:,} tokens, "
        f"{run.text_tokens} of text",
        f"ranks                  {run.world_size} = {run.replicas} replicas x sp_size {settings.sp_size}, {sharding}, "
        f"activation checkpointing {settled(run).checkpointing}",
    ]
    if run.config.needs_anchor and settings.reference_mode_offload:
        lines.append(f"anchor                 {trained_bytes(run) / GIB:.2f} GiB on the CPU for each rank")
    return lines


def memory_lines(counted: Memory) -> list[str]:
    """GiB of each item in each phase, the sum, and the peak."""
    phases = counted.phases
    names = dict.fromkeys(name for items in phases.values() for name in items)
    rows = {name: [items.get(name, 0.0) for items in phases.values()] for name in names}
    rows = {name: sizes for name, sizes in rows.items() if any(sizes)} | {"sum": [*map(counted.total, phases)]}
    lines = ["GiB per rank    " + "".join(f"{phase:>17}" for phase in phases)]
    for name, sizes in rows.items():
        lines.append(f"{name:<16}" + "".join(f"{f'{size / GIB:.2f}' if size else '-':>17}" for size in sizes))
    return [*lines, f"peak            {counted.peak() / GIB:.2f} GiB, in the phase '{counted.peak_phase()}'"]


def cost_lines(run: PlannedRun) -> list[str]:
    """FLOPs, messages and seconds of an iteration, the length of the run, and what would be fastest here."""
    spent, sent, time = cost(run), traffic(run), duration(run)
    forward, change = spent.forward, fastest_change(run)
    lines = [
        f"forward                {_number(forward.total / 1e12)} TFLOP, {forward.attention / forward.total:.0%} of it "
        "attention",
        f"rollout                {_number(spent.forwards_per_rollout)} forward-equivalents "
        f"({run.settings.grpo_sampling_steps} steps, {run.num_trained_steps} trained, {run.plan.sampled_branches:.3g} "
        f"branches), decoding and scoring {_number(spent.video_flops / 1e15)} PFLOP",
        f"iteration              {spent.rollouts} rollouts, {_number(spent.flops / 1e15)} PFLOP: "
        f"{_number(time.computing)} s to compute, {_number(time.waiting)} s more for communication",
        f"communication          {_number(sent.received / 1e12)} TB to each GPU, "
        f"{_number(sent.from_other_nodes / 1e12)} TB from other nodes: {_number(time.network)} s",
        *length_lines(run),
        *checkpoint_lines(run),
    ]
    if change is not None:
        best = run.with_settings(**change)
        what = f"{flags(change) or 'as it is'}: {_number(duration(best).total)} s, {memory(best).needed_gib:.1f} GiB"
        lines.append(f"fastest                {what}")
    return lines


def near_lines(run: PlannedRun) -> list[str]:
    """Lines of the legal runs, nearest first, with what each takes."""
    lines = []
    for near in islice(run.legal_near(), _NEAREST):
        counted, seconds = memory(near), duration(near).total
        fits = "fits" if counted.fits(run.hardware.gpu_memory) else "too large"
        each = _number(seconds / cost(near).rollouts)
        lines.append(f"{near}: {counted.peak() / GIB:.1f} GiB, {fits}, {_number(seconds)} s, {each} s a rollout")
    return labelled("legal near it", lines or ["nothing"])


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


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
