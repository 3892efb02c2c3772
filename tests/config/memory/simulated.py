"""The setting that was simulated with fake tensors: one forward and backward pass of 121 frames, fused AdamW."""

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.phases import GIB, memory
from hyvideo.config.memory.run_shape import RunShape

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

TRANSFORMER = (
    "parameters",
    "optimizer state",
    "EMA",
    "anchor",
    "gradients",
    "activations",
    "working weights",
    "temporaries",
)


def transformer_gib(shape: RunShape, architecture: Architecture) -> float:
    """Peak of the transformer and its training, without the models around it."""
    counted = memory(shape, architecture)
    items = (counted.items(phase) for phase in counted.phases)
    return max(sum(of_phase.get(name, 0.0) for name in TRANSFORMER) for of_phase in items) / GIB
