"""The plan in words: memory by phase, cost, legal combinations, and one line of advice."""

from hyvideo.config.memory.advice import verdict
from hyvideo.config.memory.cost import cost, seconds
from hyvideo.config.memory.legal import combinations_near, problems, with_combination
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.persistent import anchor_bytes
from hyvideo.config.memory.phases import CONTEXT_GIB, FRAGMENTATION, GIB, Memory, memory
from hyvideo.config.memory.run_shape import RunShape
from hyvideo.config.settings import Config

NOT_COUNTED = (
    f"Not counted, and kept free by `fits`: the CUDA context and NCCL's buffers ({CONTEXT_GIB:g} GiB) and the "
    f"allocator's fragmentation ({FRAGMENTATION:.0%}). Not counted at all: workspaces of kernels, activations of the "
    "encoders and of the reward models, a validation at a larger size, a checkpoint that is being written. The numbers "
    "are calculated, checked against a simulation with fake tensors and not against a GPU."
)
_COMBINATIONS = 12


def report(config: Config, shape: RunShape, architecture: Architecture, *, gpu_memory: float, rate: float) -> str:
    """Everything about one run; ``gpu_memory`` in GiB, ``rate`` in TFLOP/s that a GPU reaches."""
    illegal = problems(config, shape, architecture)
    parts = [
        "\n".join(run_lines(shape, architecture)),
        "\n".join(memory_lines(memory(shape, architecture))),
        "\n".join(cost_lines(shape, architecture, rate)) if not illegal else "",
        "\n".join(combination_lines(config, shape, architecture, gpu_memory, rate)),
        verdict(config, shape, architecture, gpu_memory),
    ]
    return "\n\n".join(filter(None, parts))


def run_lines(shape: RunShape, architecture: Architecture) -> list[str]:
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


def combination_lines(
    config: Config, shape: RunShape, architecture: Architecture, gpu_memory: float, rate: float
) -> list[str]:
    """The legal neighbours, nearest first, with what each takes."""
    lines = ["legal near it     world   sp   dp  batch_size  num_generations   GiB  fits  s/iteration  s/rollout"]
    for found in combinations_near(config, shape, architecture, _COMBINATIONS):
        near = with_combination(shape, found)
        counted, duration = memory(near, architecture), seconds(near, architecture, rate)
        rollouts = near.replicas * near.rollouts_per_replica
        fits = "yes" if counted.fits(gpu_memory) else "no"
        lines.append(
            f"                {found.world_size:>7} {found.sp_size:>4} {found.replicas:>4} {found.batch_size:>11} "
            f"{found.num_generations:>16} {counted.peak() / GIB:>5.1f} {fits:>5} "
            f"{_number(duration):>12} {_number(duration / rollouts):>10}"
        )
    return lines if len(lines) > 1 else ["legal near it    nothing"]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _number(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
