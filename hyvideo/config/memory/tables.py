"""Markdown tables of memory over numbers of GPUs and sp_size: of the transformer alone, and of a run."""

from collections.abc import Collection
from dataclasses import replace

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.phases import GIB, TRANSFORMER, memory
from hyvideo.config.memory.report import NOT_COUNTED
from hyvideo.config.memory.run_shape import RunShape

WORLDS, SP_SIZES = (8, 16, 64), (1, 2, 4, 8)

# What was simulated with fake tensors: one forward and backward pass of 121 frames, AdamW without temporaries.
SIMULATED = RunShape(
    world_size=8,
    sp_size=1,
    enable_fsdp=True,
    batch_size=1,
    num_generations=1,
    frames=121,
    height=480,
    width=848,
    trained_steps=1,
    anchor_weight_type="bf16",
)

_VARIANTS = {
    "8 GPUs, sp 8, no checkpointing": {"sp_size": 8, "activation_checkpointing": "none"},
    "8 GPUs, sp 8, selective checkpointing": {"sp_size": 8, "activation_checkpointing": "selective"},
    "64 GPUs, sp 8, selective checkpointing": {
        "world_size": 64,
        "sp_size": 8,
        "activation_checkpointing": "selective",
    },
    "8 GPUs, sp 8, 720 x 1280": {"sp_size": 8, "height": 720, "width": 1280},
    "64 GPUs, sp 8, 720 x 1280": {"world_size": 64, "sp_size": 8, "height": 720, "width": 1280},
    "8 GPUs, sp 8, bf16 parameters and optimizer": {"sp_size": 8, "master_weight_type": "bf16"},
    "8 GPUs, sp 8, LoRA of rank 64": {"sp_size": 8, "lora_rank": 64, "has_anchor": False},
    "1 GPU, 33 frames, LoRA of rank 64": {"world_size": 1, "frames": 33, "lora_rank": 64, "has_anchor": False},
}


def transformer_gib(shape: RunShape, architecture: Architecture) -> float:
    """Peak of the transformer and its training, without the models around it."""
    return memory(shape, architecture).peak(TRANSFORMER) / GIB


def markdown(shape: RunShape, architecture: Architecture, command: str) -> str:
    """The tables of the simulated setting and of a run, and what they leave out; ``command`` made them."""
    released = Architecture()
    return "\n\n".join(
        [
            "# Memory per GPU",
            f"Made by `{command}`; without `--table` it says of one run where the memory goes, what an iteration "
            "costs, which numbers of GPUs are legal, and what to change.",
            "## The transformer alone",
            "GiB of the 8.3 B model, its gradients, AdamW, a bf16 anchor and one forward and backward pass: 121 frames "
            "of 480 x 848, 300 text tokens, a batch of one and one branch, FSDP with float32 shards that computes in "
            "bf16, full activation checkpointing. A simulation of the model on fake tensors agrees within 6 % "
            "(`tests/planning/test_memory.py`).",
            _table(SIMULATED, released, TRANSFORMER),
            _rows("| variant | GiB |", _variants(released)),
            "## A run",
            f"GiB at the peak of {shape.frames} frames of {shape.height} x {shape.width} with these settings: "
            f"{_settings(shape)}. Beside the transformer it counts encoders, VAE, decoding, reward models, stored "
            "trajectories, and gradients that are there while the next activations are made. Whether the rollouts of a "
            "cell make whole groups is not asked here.",
            _table(shape, architecture, None),
            NOT_COUNTED,
        ]
    )


def _table(shape: RunShape, architecture: Architecture, only: Collection[str] | None) -> str:
    rows = []
    for world_size in WORLDS:
        cells = (
            memory(replace(shape, world_size=world_size, sp_size=sp_size), architecture).peak(only) / GIB
            for sp_size in SP_SIZES
        )
        rows.append(f"| {world_size} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    return _rows("| GPUs | " + " | ".join(f"sp {sp_size}" for sp_size in SP_SIZES) + " |", rows)


def _variants(architecture: Architecture) -> list[str]:
    return [
        f"| {name} | {transformer_gib(replace(SIMULATED, **changes), architecture):.1f} |"
        for name, changes in _VARIANTS.items()
    ]


def _rows(head: str, rows: list[str]) -> str:
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows])


def _settings(shape: RunShape) -> str:
    trained = f"LoRA of rank {shape.lora_rank}" if shape.lora_rank else "all parameters"
    optimizer = "Muon" if shape.use_muon else "AdamW"
    return (
        f"{trained} with {optimizer}, {shape.master_weight_type} parameters, "
        f"{'FSDP' if shape.enable_fsdp else 'no FSDP'}, {shape.activation_checkpointing} checkpointing, "
        f"batch_size {shape.batch_size}, {shape.num_branches} branches{' at once' if shape.batch_guidance else ''}, "
        f"anchor {'offloaded' if shape.reference_mode_offload else 'on the GPU' if shape.has_anchor else 'absent'}"
    )
