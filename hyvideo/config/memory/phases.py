"""Bytes on one GPU in every phase of an iteration: what all phases hold, and what each one adds.

    rollout -> decode -> anchor -> update: forward, backward, many times -> optimizer -> perhaps validation

Memory peaks twice in the update: when a backward pass begins (all kept activations) and when it ends (all gradients).
From the second backward pass of an update on, the first peak includes the gradients.
"""

from dataclasses import dataclass

from hyvideo.config.memory import activations
from hyvideo.config.memory import persistent as states
from hyvideo.config.memory.planned_run import BYTES, PlannedRun

GIB = 2**30

# Reserved for what is not counted: CUDA's context and NCCL's buffers take 1 to 3 GiB, fragmentation a few percent.
CONTEXT_GIB = 3.0
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Memory:
    """Bytes by phase and item."""

    phases: dict[str, dict[str, float]]

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())

    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    def peak(self) -> float:
        return self.total(self.peak_phase())

    def fits(self, gpu_memory: float) -> bool:
        """Return whether the peak, with the reserve, fits into ``gpu_memory`` GiB."""
        return self.needed_gib <= gpu_memory

    @property
    def needed_gib(self) -> float:
        """Peak with the reserve for CUDA's context and fragmentation."""
        return self.peak() / GIB * (1 + FRAGMENTATION) + CONTEXT_GIB


def resolve_auto(run: PlannedRun) -> PlannedRun:
    """Return the run with ``auto`` checkpointing replaced: selective if it fits the GPU, else full; full on a CPU."""
    if run.settings.activation_checkpointing != "auto":
        return run
    selective, full = (run.with_settings(activation_checkpointing=kind) for kind in ("selective", "full"))
    fits = run.config.model.device != "cpu" and memory(selective).fits(run.hardware.gpu_memory)
    return selective if fits else full


def memory(run: PlannedRun) -> Memory:
    """Return the bytes on one rank of the run."""
    run = resolve_auto(run)
    update, is_offloaded = run.settings.mini_batch_size_per_update, run.settings.reference_mode_offload
    gradients = copied = states.trained_bytes(run)  # an offloaded copy swaps places with the policy
    resident = {
        "parameters": states.parameter_bytes(run),
        "optimizer state": states.optimizer_bytes(run),
        "EMA": copied if run.settings.ema_decay and not is_offloaded else 0.0,
        "anchor": copied if run.config.needs_anchor and not is_offloaded else 0.0,
        "encoders": states.encoder_bytes(run),
        "VAE": run.architecture.vae_parameters * BYTES[run.settings.vae_dtype],
        "reward models": run.reward_bytes,
        "trajectories": states.trajectory_bytes(run),
    }
    gathered = {"working weights": states.working_weight_bytes(run, with_gradient=False)}
    training = {"working weights": states.working_weight_bytes(run, with_gradient=True)}
    kept, block = activations.kept_bytes(run), activations.block_bytes(run)
    phases = {
        "rollout": {"activations": activations.inference_bytes(run, run.settings.batch_size)} | gathered,
        "decode": {"decoding": states.decoding_bytes(run)},
        "anchor": {"activations": activations.inference_bytes(run, update)} | gathered,
        "backward begins": training
        | {"gradients": gradients if run.backwards_per_update > 1 else 0.0, "activations": kept + block},
        "backward ends": training | {"gradients": gradients, "activations": kept / run.architecture.num_layers + block},
        "optimizer": {"gradients": gradients},
    }
    if not run.config.needs_anchor:
        del phases["anchor"]
    if validation := run.validation:
        sampling = activations.inference_bytes(validation, validation.settings.batch_size)
        decoding = states.decoding_bytes(validation)
        is_larger = sampling + sum(gathered.values()) > decoding
        phases["validation"] = {"activations": sampling} | gathered if is_larger else {"decoding": decoding}
    return Memory({phase: resident | items for phase, items in phases.items()})
