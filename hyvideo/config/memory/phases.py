"""Bytes on one GPU in every phase of an iteration: what all phases hold, and what each holds on top.

    rollout -> decode -> anchor -> update: forward, backward, many times -> optimizer

In the update memory has two summits, when the backward pass begins (all kept activations) and when it ends (all
gradients). From the second backward pass of an update on, the first summit has the gradients as well.
"""

from dataclasses import dataclass

from hyvideo.config.memory import activations
from hyvideo.config.memory import persistent as states
from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.run_shape import RunShape

GIB = 2**30

# Not counted, and kept free: CUDA's context and NCCL's buffers take 1 to 3 GiB; the allocator loses a few percent.
CONTEXT_GIB = 3.0
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Memory:
    """Bytes by item."""

    resident: dict[str, float]  # in every phase
    phases: dict[str, dict[str, float]]  # what each phase has on top

    def items(self, phase: str) -> dict[str, float]:
        """All that a phase holds."""
        local = self.phases[phase]
        return {name: self.resident.get(name, 0.0) + local.get(name, 0.0) for name in self.resident | local}

    def total(self, phase: str) -> float:
        return sum(self.items(phase).values())

    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    def peak(self) -> float:
        return self.total(self.peak_phase())

    def fits(self, gpu_memory: float) -> bool:
        """Claims that the peak leaves room for what is not counted; ``gpu_memory`` in GiB."""
        return self.needed_gib <= gpu_memory

    @property
    def needed_gib(self) -> float:
        """The peak with what is not counted but always there."""
        return self.peak() / GIB * (1 + FRAGMENTATION) + CONTEXT_GIB


def memory(shape: RunShape, architecture: Architecture) -> Memory:
    """Bytes that one rank of the run holds."""
    anchor = states.anchor_bytes(shape, architecture)
    resident = {
        "parameters": states.parameter_bytes(shape, architecture),
        "optimizer state": states.optimizer_bytes(shape, architecture),
        "EMA": states.ema_bytes(shape, architecture),
        "anchor": 0.0 if shape.reference_mode_offload else anchor,
        "encoders": states.encoder_bytes(shape, architecture),
        "VAE": states.vae_bytes(shape, architecture),
        "reward models": shape.reward_bytes,
        "trajectories": states.trajectory_bytes(shape, architecture),
    }
    gathered = states.working_weight_bytes(shape, architecture, with_gradient=False)
    phases = {
        "rollout": {
            "activations": activations.inference_bytes(shape, architecture, shape.batch_size),
            "working weights": gathered,
        },
        "decode": {"decoding": states.decoding_bytes(shape, architecture)},
        "anchor": {
            "activations": activations.inference_bytes(shape, architecture, shape.mini_batch_size_per_update),
            "working weights": gathered,
        },
    }
    if not shape.has_anchor:
        del phases["anchor"]
    return Memory(resident, phases | _training(shape, architecture))


def _training(shape: RunShape, architecture: Architecture) -> dict[str, dict[str, float]]:
    gradients = states.gradient_bytes(shape, architecture)
    block = activations.block_bytes(shape, architecture)
    kept = activations.kept_bytes(shape, architecture)
    working = {"working weights": states.working_weight_bytes(shape, architecture, with_gradient=True)}
    return {
        "backward begins": working
        | {
            "gradients": gradients if shape.backwards_per_update > 1 else 0.0,
            "activations": kept + block,
        },
        "backward ends": working | {"gradients": gradients, "activations": kept / architecture.num_layers + block},
        "optimizer": {
            "gradients": gradients,
            # torch's foreach AdamW holds the square roots of all second moments.
            "temporaries": gradients if shape.foreach_optimizer else 0.0,
        },
    }
