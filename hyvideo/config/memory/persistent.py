"""Bytes that stay between the passes: parameters, gradients, optimizer state, anchor, and the frozen models around."""

import math

from hyvideo.config.memory.planned_run import BYTES, PlannedRun


def trained_parameters(run: PlannedRun) -> int:
    """Number of the parameters that are trained: the adapter's, or all."""
    rank = run.settings.lora_rank
    return run.architecture.lora_parameters(rank) if rank else run.architecture.parameters


def trained_bytes(run: PlannedRun) -> float:
    """Bytes of what is trained on this rank, in shards or whole: of its weights and gradients."""
    return trained_parameters(run) / run.num_shards * run.master_bytes


def parameter_bytes(run: PlannedRun) -> float:
    """Bytes of the policy; below an adapter the frozen weights are kept in the precision that they compute in."""
    frozen = run.architecture.parameters * run.compute_bytes / run.num_shards if run.settings.lora_rank else 0.0
    return trained_bytes(run) + frozen


def optimizer_bytes(run: PlannedRun) -> float:
    """Bytes of two moments of AdamW, one of Muon, in the precision of the parameters.

    Muon has the matrices of attention and feed-forward, about two thirds, or nearly all.
    """
    model = run.architecture
    hidden = model.matrix_parameters / model.parameters
    by_muon = 1.0 if run.settings.muon_scope == "all" or run.settings.lora_rank else hidden
    return (2 - (by_muon if run.settings.use_muon else 0.0)) * trained_bytes(run)


def working_weight_bytes(run: PlannedRun, *, with_gradient: bool) -> float:
    """Bytes of weights in the form that a matrix product takes, and of gradients on their way back into shards.

    FSDP gathers the block that is computed and prefetches the next; the flat buffer of a gather is there next to what
    it is copied into, and the root's own parameters stay gathered. In the backward pass come the block's gradient in
    the computing precision and the float32 buffer that is reduced. Without FSDP autocast keeps a cast copy of every
    weight until the forward pass ends.
    """
    model, settings = run.architecture, run.settings
    if not settings.enable_fsdp:
        needs_cast = run.compute_bytes < run.master_bytes and not settings.lora_rank
        return model.parameters * run.compute_bytes if needs_cast else 0.0
    gathered = (3 if settings.reshard_after_forward else model.num_layers) * model.block_parameters
    total = (model.root_parameters + gathered) * run.compute_bytes
    if with_gradient and not settings.lora_rank:
        total += model.block_parameters * (run.compute_bytes + 4)
    return total


def encoder_bytes(run: PlannedRun) -> float:
    """Bytes of encoders, whole on every rank unless conditions are precomputed; 0 for a model whose are not known."""
    if run.settings.precompute_conditions or not run.architecture.is_released:
        return 0.0
    with_images = "i2v" in run.settings.transformer_version
    return run.architecture.encoder_bytes(BYTES[run.settings.encoder_dtype], with_images=with_images)


def decoding_bytes(run: PlannedRun) -> float:
    """Bytes of what decoding a tile holds, and of the videos."""
    videos, (frames, *sides) = run.settings.decode_batch_size, run.config.rollout_size
    height, width = (min(run.settings.vae_tile_size or max(sides), side) for side in sides)
    values = run.architecture.decoding_values(videos, frames, height, width)
    # The tiles, and the video that they are blended into.
    return (values + videos * 2 * 3 * math.prod(run.config.rollout_size)) * BYTES[run.settings.vae_dtype]


def trajectory_bytes(run: PlannedRun) -> float:
    """Bytes of float32 latents around the steps, means, in nft old velocities, and the anchor's, at most."""
    latent = run.architecture.out_channels * math.prod(run.architecture.latent_size(*run.config.rollout_size))
    num_steps = run.settings.grpo_sampling_steps
    states = num_steps + 1 + (run.old_forwards if run.settings.objective == "nft" else num_steps)
    if run.settings.kl_compute_mode == "rollout_phase":
        states += run.anchor_forwards
    return 4 * latent * states * run.rollouts_per_replica
