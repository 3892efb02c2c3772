"""Bytes on one GPU in every phase of a run: what all phases of an iteration hold, and what each one
adds.

    encode, once, before the transformer is loaded
    rollout -> decode -> score -> anchor -> update: forward, backward, many times -> optimizer -> perhaps validation

A pass with a reward gradient decodes and scores between forward and backward.

Scorers run beside rollout, decode and anchor, unless ``score_between_stages`` gives them a separate
phase. Memory peaks twice in the update: when a backward pass begins (all kept activations) and when
it ends (all gradients).
"""

from dataclasses import dataclass

from hyvideo.planning import activations
from hyvideo.planning import persistent as states
from hyvideo.planning.planned_run import BYTES, SCORING, PlannedRun

GIB = 2**30

# Reserved for what is not counted: CUDA's context, NCCL's buffers with several ranks, and a few
# percent fragmentation.
CONTEXT_GIB, CONTEXT_AND_NCCL_GIB = 0.8, 3.0
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Memory:
    """Bytes by phase and item."""

    phases: dict[str, dict[str, float]]
    context_gib: float = CONTEXT_AND_NCCL_GIB

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
        return self.peak() / GIB * (1 + FRAGMENTATION) + self.context_gib


def resolve_auto(run: PlannedRun) -> PlannedRun:
    """Return the run with ``auto`` checkpointing replaced: selective if it fits the GPU, else full;
    full on a CPU.
    """
    if run.settings.activation_checkpointing != "auto":
        return run
    selective, full = (
        run.with_settings(activation_checkpointing=kind) for kind in ("selective", "full")
    )
    fits = run.config.model.device != "cpu" and memory(selective).fits(run.hardware.gpu_memory)
    return selective if fits else full


def memory(run: PlannedRun) -> Memory:
    """Return the bytes on one rank of the run."""
    run = resolve_auto(run)
    settings = run.settings
    update, is_offloaded = settings.mini_batch_size_per_update, settings.reference_mode_offload
    compared = run.with_settings(cfg_scale=max(settings.cfg_scale, run.config.anchor_cfg_scale))
    gradients = copied = states.trained_bytes(run)  # an offloaded copy swaps places with the policy
    resident = {
        "parameters": states.parameter_bytes(run),
        "modulation": states.modulation_bytes(run),
        "optimizer state": states.optimizer_bytes(run),
        "EMA": copied if settings.ema_decay and not is_offloaded else 0.0,
        "anchor": copied if run.config.needs_anchor and not is_offloaded else 0.0,
        "encoders": 0.0 if settings.precompute_conditions else states.encoder_bytes(run),
        "trajectories": states.trajectory_bytes(run),
    }
    vae = {"VAE": run.architecture.vae_parameters * BYTES[settings.vae_dtype]}
    scorers = {"reward models": run.reward_bytes}
    if not settings.vae_offload:
        resident.update(vae)
    if not settings.reward_offload:
        resident.update(scorers)
    has_videoalign = "videoalign" in settings.reward_model and run.reward_bytes
    scoring = scorers | {"scoring": SCORING if has_videoalign else 0.0}
    beside = {} if settings.score_between_stages else scoring
    gathered = {"working weights": states.working_weight_bytes(run, with_gradient=False)}
    training = {"working weights": states.working_weight_bytes(run, with_gradient=True)}
    kept, block = activations.kept_bytes(run), activations.block_bytes(run)
    phases = {
        "rollout": {"activations": activations.inference_bytes(run, settings.batch_size)}
        | gathered
        | beside,
        "decode": {"decoding": states.decoding_bytes(run)} | vae | beside,
        "score": scoring,
        "anchor": {"activations": activations.inference_bytes(compared, update)}
        | gathered
        | beside,
        "backward begins": training
        | {
            "gradients": gradients if run.backwards_per_update > 1 else 0.0,
            "activations": kept + block,
        },
        "backward ends": training
        | {"gradients": gradients, "activations": kept / run.architecture.num_layers + block},
        "optimizer": {"gradients": gradients},
    }
    if run.config.uses_pairs:  # videos are read instead of sampled, and only validation scores any
        for phase in ("rollout", "decode", "score"):
            del phases[phase]
        phases["anchor"] = {
            name: size for name, size in phases["anchor"].items() if name not in beside
        }
    if run.plan.num_reward_steps:  # between the forward and the backward pass of the transformer
        phases["reward gradient"] = (
            training
            | vae
            | scorers
            | {"gradients": gradients if run.backwards_per_update > 1 else 0.0, "activations": kept}
            | {"decoding with gradient": max(states.reward_gradient_bytes(run), scoring["scoring"])}
        )
    if not run.config.needs_anchor:
        del phases["anchor"]
    if beside or not run.reward_bytes:
        phases.pop("score", None)
    if validation := run.validation:
        sampling = activations.inference_bytes(validation, validation.settings.batch_size)
        decoding = states.decoding_bytes(validation)
        measuring = run.with_settings(
            reward_model=settings.held_out_reward_model, remote_reward_url=""
        )
        held_out = {"held-out reward models": measuring.reward_bytes}
        parts = (
            {"activations": sampling} | gathered,
            {"decoding": decoding} | vae,
            scoring | held_out,
        )
        phases["validation"] = max(parts, key=lambda items: sum((resident | items).values()))
    counted = {phase: resident | items for phase, items in phases.items()}
    if settings.precompute_conditions:
        encode = {"encoders": states.encoder_bytes(run)}
        if not settings.reward_offload:
            encode.update(scorers)
        if run.has_images or not settings.vae_offload:
            encode.update(vae)
        counted = {"encode": encode} | counted
    # before the transformer is loaded; encoding needs about as much as decoding
    if run.config.uses_pairs:
        encode = (
            vae
            | {"encoding": states.decoding_bytes(run)}
            | ({} if settings.reward_offload else scorers)
        )
        encode["encoders"] = 0.0 if settings.precompute_conditions else states.encoder_bytes(run)
        counted = {"encode videos": encode} | counted
    return Memory(counted, CONTEXT_GIB if run.world_size == 1 else CONTEXT_AND_NCCL_GIB)
