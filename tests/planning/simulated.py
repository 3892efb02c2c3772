"""Run that was simulated with fake tensors: one forward and backward pass of 121 frames, fused
AdamW.
"""

from dataclasses import replace

from hyvideo.models.sizes import released_sizes
from hyvideo.planning.memory import GIB, memory
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.settings.config import Config

RELEASED = released_sizes("480p_t2v")
SETTINGS = {
    "enable_fsdp": True,
    "activation_checkpointing": "full",
    "batch_size": 1,
    "num_generations": 1,
    "cfg_scale": 1.0,
    "shift": 5.0,
    "timestep_fraction": 0.05,  # one of 20 steps
    "optimizer": "adamw",
    "sample_n_frames": 121,
    "height": 480,
    "width": 848,
    "reward_model": [],
}
LORA = {"lora_rank": 64, "kl_weight": 0.0}

TRANSFORMER = (
    "parameters",
    "optimizer state",
    "EMA",
    "anchor",
    "gradients",
    "activations",
    "working weights",
)


def simulated(world_size: int = 8, **changes) -> PlannedRun:
    return PlannedRun(
        Config().with_settings(**SETTINGS).with_settings(**changes).resolved(),
        world_size,
        RELEASED,
    )


def with_layers(run: PlannedRun, num_layers: int) -> PlannedRun:
    """Return the run of a transformer with fewer blocks."""
    sizes = run.architecture
    settings = {**sizes.transformer, "num_layers": num_layers}
    return replace(run, architecture=replace(sizes, num_layers=num_layers, transformer=settings))


def transformer_gib(run: PlannedRun) -> float:
    """Return the peak of the transformer and its training, without other models, and with an anchor
    in bf16.
    """
    peaks = (
        sum(items.get(name, 0.0) for name in TRANSFORMER) for items in memory(run).phases.values()
    )
    anchor = memory(run).phases["rollout"]["anchor"]
    return (max(peaks) - anchor * (1 - 2 / run.master_bytes)) / GIB


# Block counted on the simulated GPU: 81 frames of 480 x 864.
BLOCK_TOKENS, BLOCK_TEXT = 21 * 30 * 54, 200
