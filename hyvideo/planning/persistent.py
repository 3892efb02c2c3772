"""Bytes that persist between passes: parameters, gradients, optimizer state, anchor, and the frozen
models.
"""

import math

from hyvideo.models.placement import Weights
from hyvideo.planning.planned_run import BYTES, PlannedRun


def trained_parameters(run: PlannedRun) -> int:
    """Return the number of trained parameters: of the LoRA, or all."""
    rank = run.settings.lora_rank
    return rank * run.parameters.per_lora_rank if rank else run.parameters.total


def trained_bytes(run: PlannedRun) -> float:
    """Return the bytes of the trained weights, or of their gradients, on a rank."""
    return trained_parameters(run) / run.num_shards * run.master_bytes


def parameter_bytes(run: PlannedRun) -> float:
    """Return the bytes of the policy: trained weights and, under a LoRA, frozen weights."""
    if not run.settings.lora_rank:
        return trained_bytes(run)
    return trained_bytes(run) + frozen_bytes(run)


def frozen_bytes(run: PlannedRun) -> float:
    """Return the bytes of the weights under a LoRA on a rank."""
    on_cpu = run.parameters.modulation if run.caches_modulation else 0
    stored = stored_bytes(run, run.parameters.total - on_cpu, run.settings.base_weight_dtype)
    return stored / run.num_shards


def expert_weights(run: PlannedRun, weight_dtype: str) -> Weights:
    """Return the frozen weights of an expert, or of a single transformer, as stored."""
    model = run.parameters
    return Weights(
        stored_bytes(run, model.total, weight_dtype),
        outer=model.root * run.compute_bytes,
        num_blocks=model.num_blocks,
    )


def vae_weights(run: PlannedRun) -> Weights:
    return Weights(run.parameters.vae * BYTES[run.settings.vae_dtype])


def partner_bytes(run: PlannedRun, *, is_used: bool) -> float:
    """Return the bytes of the frozen expert of a model of two on a GPU while it predicts, or while
    it does not: all of it, or a shard.
    """
    if run.config.trained_expert is None:
        return 0.0
    weights = expert_weights(run, run.settings.partner_weight_dtype)
    return weights.on_gpu(run.config.placements.partner, is_used=is_used) / run.num_shards


def stored_bytes(run: PlannedRun, parameters: int, weight_dtype: str) -> float:
    """Return the bytes of frozen weights. In fp8, a weight of the blocks' matrices has one byte, and
    a row of them a float32 scale.
    """
    in_fp8 = run.parameters.matrices if weight_dtype == "fp8" else 0
    scales = 4 * in_fp8 / run.architecture.width
    return in_fp8 + scales + (parameters - in_fp8) * run.compute_bytes


def modulation_bytes(run: PlannedRun) -> float:
    """Return the bytes of the cached outputs of the modulation layers: one value per row of them
    and timestep.

    The timesteps are the steps of a rollout or a validation, or the noise levels of an iteration of
    nft, which are three times as many for a flow map and its derivatives.
    """
    if not run.caches_modulation:
        return 0.0
    settings = run.settings
    timesteps = [settings.grpo_sampling_steps]
    if run.validation:
        timesteps.append(run.validation.settings.grpo_sampling_steps)
    if run.config.objective.trains == "levels":
        levels = run.plan.num_trained_steps + run.plan.num_reward_steps
        levels_of_derivative = 2 if run.derivative_forwards else 0
        timesteps.append(levels * run.rollouts_per_replica * (1 + levels_of_derivative))
    if run.config.objective.trains == "path":
        timesteps.append(run.plan.num_anchor_steps)
    outputs = run.parameters.modulation / (run.architecture.width + 1)
    return max(timesteps) * outputs * run.compute_bytes


def optimizer_bytes(run: PlannedRun) -> float:
    """Return the bytes of the optimizer state: two moments of AdamW, one of Muon, in the precision
    of parameters.
    """
    counted = run.parameters
    hidden = 0.0 if run.settings.lora_rank else counted.matrices / counted.total
    by_muon = {"muon": hidden, "muon_all": 1.0, "adamw": 0.0}[run.settings.optimizer]
    return (2 - by_muon) * trained_bytes(run)


def working_weight_bytes(run: PlannedRun, *, with_gradient: bool) -> float:
    """Return the bytes of gathered or cast weights, and of gradients before they are reduced to
    shards.

    FSDP gathers the current block and the next, through a flat buffer, and keeps the root's
    parameters. The backward pass adds the block's gradient and its float32 buffer. Without FSDP,
    autocast keeps a cast copy of every weight.
    """
    model = run.parameters
    settings = run.settings
    has_fp8_partner = run.config.trained_expert and settings.partner_weight_dtype == "fp8"
    if has_fp8_partner or settings.lora_rank and settings.base_weight_dtype == "fp8":
        return dequantization_bytes(run)
    if not settings.enable_fsdp:
        needs_cast = run.compute_bytes < run.master_bytes and not settings.lora_rank
        return model.total * run.compute_bytes if needs_cast else 0.0
    blocks = 3 if settings.reshard_after_forward else model.num_blocks
    total = (model.root + blocks * model.block) * run.compute_bytes
    if with_gradient and not settings.lora_rank:
        total += model.block * (run.compute_bytes + 4)
    return total


def dequantization_bytes(run: PlannedRun) -> float:
    """Return the bytes of dequantizing the largest matrix: its values, and their products with the
    scales, in the precision of the computation.
    """
    return 2 * run.compute_bytes * run.parameters.largest_matrix


def kept_dequantized_bytes(run: PlannedRun) -> float:
    """Return the bytes of the dequantized matrices that all blocks keep for a backward pass: compiled
    blocks without recomputation keep them, others dequantize again.
    """
    settings = run.settings
    is_in_fp8 = settings.lora_rank > 0 and settings.base_weight_dtype == "fp8"
    if not is_in_fp8 or settings.enable_compile != "true" or run.checkpointing != "none":
        return 0.0
    return run.compute_bytes * run.parameters.matrices


def pinned_bytes(run: PlannedRun) -> dict[str, float]:
    """Return the bytes of pinned CPU memory on a rank by item: what the GPU uses without storing
    it.
    """
    settings = run.settings
    placements = run.config.placements
    copy = Weights(trained_bytes(run)).on_host(placements.copies)
    policy = Weights(frozen_bytes(run))
    partner = expert_weights(run, settings.partner_weight_dtype)
    found = {
        "anchor": copy if run.config.objective.needs_anchor else 0.0,
        "EMA": copy if settings.ema_decay else 0.0,
        "modulation layers": run.parameters.modulation * run.compute_bytes
        if run.caches_modulation
        else 0.0,
        "partner": partner.on_host(placements.partner) if run.config.trained_expert else 0.0,
        "policy": policy.on_host(placements.policy),
        "VAE": vae_weights(run).on_host(placements.vae),
    }
    return {item: size for item, size in found.items() if size}


def encoder_bytes(run: PlannedRun, *, in_groups: bool = False) -> float:
    """Return the bytes of the encoders, unsharded on every rank; 0 if their sizes are unknown."""
    if not run.architecture.has_released_encoders:
        return 0.0
    known = run.architecture.memory
    parameters = known.encoders_in_groups if in_groups else known.encoders
    if run.has_images:
        parameters += known.image_encoder
    return parameters * BYTES[run.settings.encoder_dtype] + 4 * known.float32_encoders


def decoding_bytes(run: PlannedRun) -> float:
    videos, tile = run.settings.decode_batch_size, run.settings.vae_tile_size
    value_bytes = BYTES[run.settings.vae_dtype]
    return run.architecture.decoding.bytes(videos, run.config.sampling.size, tile, value_bytes)


def reward_gradient_bytes(run: PlannedRun) -> float:
    """Return the peak bytes of decoding with a gradient, and of its backward pass."""
    videos = min(run.settings.decode_batch_size, run.settings.mini_batch_size_per_update)
    tile = run.settings.vae_tile_size
    value_bytes = BYTES[run.settings.vae_dtype]
    size = run.config.sampling.size
    return run.architecture.decoding.gradient_bytes(videos, size, tile, value_bytes)


def trajectory_bytes(run: PlannedRun) -> float:
    """Return the peak bytes of float32 trajectories: latents, means or nft's old velocities, and
    anchor means.

    Rollouts of nft keep three latents: the noise, those after the first step, and the final ones.
    With a reward gradient, they keep the latents of all steps.
    """
    latent = run.architecture.out_channels * math.prod(
        run.architecture.latent_size(*run.config.sampling.size)
    )
    num_steps = run.settings.grpo_sampling_steps
    if run.config.objective.videos_from:
        states = 1
    elif run.config.objective.trains == "levels":
        kept = num_steps + 1 if run.plan.num_reward_steps else min(num_steps + 1, 3)
        states = kept + run.old_forwards
    else:
        states = num_steps + 1 + num_steps
    compared = run.anchor_forwards
    # one mean velocity of the teacher for each step
    if run.config.objective.trains == "path":
        states = num_steps + 1
        compared = run.plan.num_trained_steps
    return 4 * latent * (states + compared) * run.rollouts_per_replica
