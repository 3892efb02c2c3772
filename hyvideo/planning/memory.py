"""Bytes on one GPU in every phase of a run: what all phases of an iteration hold, and what each one
adds.

    encode, once, before the transformer is loaded
    rollout -> decode -> score -> anchor -> update: forward, backward, many times -> optimizer -> perhaps validation

A pass with a reward gradient decodes and scores between forward and backward.

Scorers run beside rollout, decode and anchor, unless ``offload reward`` gives them a separate
phase. Memory peaks twice in the update: when a backward pass begins (all kept activations) and when
it ends (all gradients).
"""

from dataclasses import dataclass

from hyvideo.models.placement import Placement, Weights
from hyvideo.planning import activations
from hyvideo.planning import persistent as states
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.scorers import scorer_bytes, scoring_bytes

GIB = 2**30

# Reserved for what is not counted: CUDA's context, NCCL's buffers with several ranks, and a few
# percent fragmentation.
CONTEXT_GIB, CONTEXT_AND_NCCL_GIB = 0.8, 3.0
FRAGMENTATION = 0.05
# Without recomputation, activations are most of the memory, and the plan is confirmed to 7 % only. A
# run that ends for lack of memory costs more than recomputation, so a tenth stays free.
_FREE_WITHOUT_RECOMPUTATION = 0.1


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
    """Return the run with ``auto`` checkpointing replaced: the fastest of none, selective and full
    that fits the GPU, where none must leave a tenth of it free; full on a CPU.
    """
    if run.settings.activation_checkpointing != "auto":
        return run
    none, selective, full = (
        run.with_settings(activation_checkpointing=kind) for kind in ("none", "selective", "full")
    )
    if run.config.model.device == "cpu":
        return full
    gpu_memory = run.hardware.gpu_memory
    if memory(none).fits(gpu_memory * (1 - _FREE_WITHOUT_RECOMPUTATION)):
        return none
    return selective if memory(selective).fits(gpu_memory) else full


@dataclass(frozen=True)
class _Items:
    """Items that several phases hold."""

    vae: dict[str, float]
    scorers: dict[str, float]
    scoring: dict[str, float]  # scorers, and what they hold while they score
    beside: dict[str, float]  # what scores during rollout, decoding and anchor
    inference: dict[str, float]
    training: dict[str, float]


def memory(run: PlannedRun) -> Memory:
    """Return the bytes on one rank of the run."""
    run = resolve_auto(run)
    items = _items(run)
    resident = _resident(run, items)
    phases = _sampling(run, items) | _anchor(run, items) | _update(run, items)
    if run.validation:
        parts = _validation(run, items)
        phases["validation"] = max(parts, key=lambda part: sum((resident | part).values()))
    counted = _encoding(run, items)
    for phase, added in phases.items():
        counted[phase] = resident | added
    return Memory(counted, CONTEXT_GIB if run.world_size == 1 else CONTEXT_AND_NCCL_GIB)


def _items(run: PlannedRun) -> _Items:
    settings = run.settings
    scorers = {"reward models": run.reward_bytes}
    is_scored = run.reward_bytes > 0
    scoring = scorers | {"scoring": scoring_bytes(settings.reward_model) if is_scored else 0.0}
    return _Items(
        vae={"VAE": states.vae_weights(run).total},
        scorers=scorers,
        scoring=scoring,
        beside={} if run.config.placements.scorers == Placement.CPU else scoring,
        inference={"working weights": states.working_weight_bytes(run, with_gradient=False)},
        training={"working weights": states.working_weight_bytes(run, with_gradient=True)},
    )


def _resident(run: PlannedRun, items: _Items) -> dict[str, float]:
    """Return what all phases of an iteration hold."""
    settings = run.settings
    copied = states.trained_bytes(run)
    placements = run.config.placements
    # a copy swaps places with the policy
    on_gpu = Weights(copied).on_gpu(placements.copies, is_used=False)
    resident = {
        "parameters": states.parameter_bytes(run),
        "partner": states.partner_bytes(run, is_used=False),
        "modulation": states.modulation_bytes(run),
        "optimizer state": states.optimizer_bytes(run),
        "EMA": on_gpu if settings.ema_decay else 0.0,
        "anchor": on_gpu if run.config.objective.needs_anchor else 0.0,
        "encoders": 0.0 if settings.precompute_conditions else states.encoder_bytes(run),
        "trajectories": states.trajectory_bytes(run),
    }
    if placements.vae == Placement.GPU:
        resident |= items.vae
    if placements.scorers == Placement.GPU:
        resident |= items.scorers
    return resident


def _away(run: PlannedRun) -> dict[str, float]:
    """Return the bytes of the policy while scorers work, if its frozen weights are on the CPU."""
    if run.config.placements.policy == Placement.GPU:
        return {}
    return {"parameters": states.trained_bytes(run)}


def _partner(run: PlannedRun) -> dict[str, float]:
    """Return the bytes of the frozen expert while it predicts."""
    return {"partner": states.partner_bytes(run, is_used=True)}


def _sampling(run: PlannedRun, items: _Items) -> dict[str, dict[str, float]]:
    """Return what rollouts, their decoding and their scoring add."""
    if run.config.objective.videos_from:  # only validation samples and scores
        return {}
    activation = activations.inference_bytes(run, run.settings.batch_size)
    phases = {
        "rollout": {"activations": activation} | _partner(run) | items.inference | items.beside,
        "decode": {"decoding": states.decoding_bytes(run)} | items.vae | items.beside,
    }
    if run.reward_bytes and not items.beside:
        phases["score"] = items.scoring | _away(run)
    return phases


def _anchor(run: PlannedRun, items: _Items) -> dict[str, dict[str, float]]:
    """Return what the forward passes of the anchor add."""
    if not run.config.objective.needs_anchor:
        return {}
    guidance = max(run.config.policy_cfg_scale, run.config.anchor_cfg_scale)
    activation = activations.inference_bytes(
        run.with_settings(cfg_scale=guidance), run.settings.mini_batch_size_per_update
    )
    phase = {"activations": activation} | items.inference
    return {"anchor": phase if run.config.objective.videos_from else phase | items.beside}


def _update(run: PlannedRun, items: _Items) -> dict[str, dict[str, float]]:
    """Return what backward passes and optimizer steps add."""
    gradients = states.trained_bytes(run)
    earlier = gradients if run.backwards_per_update > 1 else 0.0  # gradients of earlier passes
    # of all blocks
    kept = activations.kept_bytes(run) + states.kept_dequantized_bytes(run)
    block = activations.block_bytes(run)  # of one block while its backward pass computes it again
    last = kept / run.architecture.num_layers + block  # the other blocks are freed by then
    phases = {
        "backward begins": items.training | {"gradients": earlier, "activations": kept + block},
        "backward ends": items.training | {"gradients": gradients, "activations": last},
        "optimizer": {"gradients": gradients},
    }
    if run.plan.num_reward_steps:  # between the forward and the backward pass of the transformer
        decoding = max(states.reward_gradient_bytes(run), items.scoring["scoring"])
        phases["reward gradient"] = (
            items.training
            | items.vae
            | items.scorers
            | {"gradients": earlier, "activations": kept, "decoding with gradient": decoding}
        )
    return phases


def _validation(run: PlannedRun, items: _Items) -> list[dict[str, float]]:
    """Return what sampling, decoding and scoring of a validation add, each."""
    validation = run.validation
    sampling = activations.inference_bytes(validation, validation.settings.batch_size)
    reward = run.config.reward
    held_out = scorer_bytes(reward, reward.held_out_reward_model)
    return [
        {"activations": sampling} | _partner(run) | items.inference,
        {"decoding": states.decoding_bytes(validation)} | items.vae,
        items.scoring | {"held-out reward models": held_out} | _away(run),
    ]


def _encoding(run: PlannedRun, items: _Items) -> dict[str, dict[str, float]]:
    """Return the bytes while prompts and rated videos are encoded, before the transformer is
    loaded.
    """
    settings = run.settings
    placements = run.config.placements
    scorers = {} if placements.scorers == Placement.CPU else items.scorers
    encoders = {"encoders": states.encoder_bytes(run)}
    phases = {}
    if run.config.objective.videos_from:  # encoding needs about as much as decoding
        phases["encode videos"] = items.vae | {"encoding": states.decoding_bytes(run)} | scorers
        if not settings.precompute_conditions:
            phases["encode videos"] |= encoders
    if settings.precompute_conditions:
        phases["encode"] = encoders | scorers
        if run.has_images or placements.vae == Placement.GPU:
            phases["encode"] |= items.vae
    return phases
