"""FLOPs and hours of a run on given GPUs.

    seconds of a pass = FLOPs / rate of the GPU + bytes of memory-bound kernels / its bandwidth
    seconds of a stage = max(computing, gathers of the weights that FSDP has sharded) + copies

Blocks that are copied from the host overlap with computing; other copies do not. Not counted:
encoders, scorers but HPSv3 and VideoAlign, copies for the scoring of a validation, exchanges of
tokens with sp_size, compilation, and the writing of files.
"""

import math
from dataclasses import dataclass

from hyvideo.models.placement import Weights
from hyvideo.planning.activations import tokens_outside_attention
from hyvideo.planning.flops import Flops, count_decoding
from hyvideo.planning.memory import resolve_auto
from hyvideo.planning.persistent import (
    expert_weights,
    frozen_bytes,
    trained_parameters,
    vae_weights,
)
from hyvideo.planning.planned_run import PlannedRun
from hyvideo.planning.scorers import scoring_flops

# Attention's backward pass has five products instead of two, because kernels compute the scores
# again. It reaches five sixths of the rate.
_ATTENTION_BACKWARD = 2.5
_BACKWARD_RATE = 5 / 6
# Traffic of a block's memory-bound kernels in a forward and a backward pass, in units of its input:
# counted by torch's compiler. A LoRA adds its own products, which are too thin to compute much.
_TRAFFIC = (29, 73)
_LORA_TRAFFIC = (67, 108)
# Rate of the VAE's convolutions relative to that of products in bf16, in half and in full precision.
_CONVOLUTIONS = 0.38
_FLOAT32_CONVOLUTIONS = 0.24
# Rate of HPSv3 relative to that of a large transformer: 81 frames took visual-rl 8.4 s on an L40S,
# which is 116 of 200 TFLOP/s. VideoAlign, which is smaller, is assumed to reach half of that.
_HPSV3 = 0.58
_VIDEOALIGN = 0.29
# Bytes that a value of a matrix in fp8 moves when it is dequantized: compiled, it is read and written
# once; otherwise, a cast and a product read and write it.
_DEQUANTIZED = {"true": 3, "false": 7}
# Scorers move between host and GPU in memory that is not pinned, at about half the rate.
_PAGEABLE = 0.5
# Launches, partly filled GPUs, optimizer steps, checks and other small parts, relative to the rest.
_SMALL_PARTS = 0.05


@dataclass(frozen=True)
class WholeRun:
    """Number and seconds of the iterations and validations of a run."""

    iterations: int
    iteration_seconds: float
    validations: int
    validation_videos: int
    validation_seconds: float
    num_gpus: int
    forwards: float  # forward passes in total; a training forward and backward counts as 3 to 4

    @property
    def seconds(self) -> float:
        return self.iterations * self.iteration_seconds + self.validations * self.validation_seconds

    @property
    def validation_share(self) -> float:
        """Fraction of the run's time that is spent on validation."""
        return self.validations * self.validation_seconds / self.seconds

    @property
    def gpu_hours(self) -> float:
        return self.num_gpus * self.seconds / 3600


def whole_run(run: PlannedRun) -> WholeRun:
    """Return the length of a run; seconds are 0 where they cannot be predicted.

    Raises ValueError for unreadable validation prompts.
    """
    settings = run.settings
    videos = run.num_validated * settings.validation_repeats
    per_video = settings.validation_steps * (run.validation or run).plan.sampled_branches
    return WholeRun(
        iterations=settings.max_steps,
        iteration_seconds=iteration_seconds(run) if run.is_timed else 0.0,
        validations=run.num_validations,
        validation_videos=videos,
        validation_seconds=validation_seconds(run, videos) if run.is_timed else 0.0,
        num_gpus=run.world_size,
        forwards=settings.max_steps * run.plan.rollouts * forwards_per_rollout(run)
        + run.num_validations * videos * per_video,
    )


def training_flops(run: PlannedRun) -> Flops:
    """Return the FLOPs of a training forward and backward pass for one video and branch.

    A backward pass has a product for the gradient of the input and, except under a LoRA, one for
    that of the weights.
    """
    kind = resolve_auto(run).checkpointing
    products = 2 if run.settings.lora_rank else 3
    attention = 1 + _ATTENTION_BACKWARD
    if kind != "none":
        products += 1
    if kind == "full":
        attention += 1
    return Flops(products * run.forward.products, attention * run.forward.attention)


def training_forwards(run: PlannedRun) -> float:
    """Return the cost of a training forward and backward pass in forward passes: 1 + 2, plus what
    is recomputed.
    """
    kind = resolve_auto(run).checkpointing
    if kind == "none":
        return 3.0
    if kind == "full":
        return 4.0
    return 3 + run.forward.products / run.forward.total


def forwards_per_rollout(run: PlannedRun) -> float:
    """Return the forward passes of all branches for a rollout: sampling, anchor means and
    training.
    """
    return run.forwards_without_gradient + training_forwards(run) * run.forwards_with_gradient


def decode_flops(run: PlannedRun) -> float:
    """Return the FLOPs of decoding one video; overlaps of tiles are decoded twice."""
    frames, height, width = run.config.sampling.size
    ratio = run.architecture.spatial_compression_ratio
    tile = run.settings.vae_tile_size // ratio
    for_rows, for_columns = (
        _tiled(side // ratio, tile, run.settings.vae_tile_overlap) * ratio
        for side in (height, width)
    )
    return count_decoding(run.architecture) * frames * for_rows * for_columns


def iteration_flops(run: PlannedRun) -> float:
    """Return the FLOPs of an iteration on all GPUs, with recomputation, without scorers."""
    passes = run.forwards_without_gradient * run.forward.total
    passes += run.forwards_with_gradient * training_flops(run).total
    decoded = _decodings(run) * decode_flops(run)
    return run.plan.rollouts * (passes + decoded)


def iteration_seconds(run: PlannedRun) -> float:
    """Return the seconds of one iteration."""
    return sum(stage_seconds(run).values())


def stage_seconds(run: PlannedRun) -> dict[str, float]:
    """Return the seconds of an iteration by the names of the stages that `StageTimer` measures."""
    forward = forward_seconds(run)
    rollouts = run.rollouts_per_replica
    checked = run.checked_forwards + run.derivative_forwards
    update = run.forwards_with_gradient * training_seconds(run) + checked * forward
    if run.plan.num_reward_steps:
        # a backward pass, and a forward pass with gradient, whose layers are computed twice
        update += (_decodings(run) - 1) * decode_seconds(run) + 3 * score_seconds(run)
    seconds = {
        "rollout": rollouts
        * (run.sampled_forwards * forward + run.partner_forwards * (_partner(run) - forward)),
        "anchor": rollouts * run.compared_forwards * forward,
        "update": rollouts * update,
    }
    gathered = gather_seconds(run)
    seconds = {stage: max(time, gathered[stage]) for stage, time in seconds.items()}
    copied = copy_seconds(run)
    seconds["rollout"] += copied["rollout"]
    decoding = _videos_to_decode(run) * decode_seconds(run) + copied["decode"]
    seconds["decode"] = decoding if run.config.objective.scores_rollouts else 0.0
    scoring = _videos_to_decode(run) * score_seconds(run) + copied["reward"]
    if run.config.objective.scores_rollouts and scoring:
        seconds["reward"] = scoring
    return {stage: (1 + _SMALL_PARTS) * time for stage, time in seconds.items()}


def validation_seconds(run: PlannedRun, num_videos: int) -> float:
    """Return the seconds of a validation of ``num_videos``, shared by the replicas; 0 without
    validation.
    """
    if not (sampling := run.validation):
        return 0.0
    videos = math.ceil(num_videos / run.plan.replicas)
    batch_size = max(1, min(videos, sampling.settings.batch_size))
    batches = math.ceil(videos / batch_size)
    sampled = sampling.with_settings(batch_size=batch_size, gradient_accumulation_steps=batches)
    per_video = decode_seconds(sampled) + score_seconds(sampled)
    per_video += _seconds_of_scorers(sampled, run.settings.held_out_reward_model)
    later = _videos_to_decode(sampled) * per_video
    return stage_seconds(sampled)["rollout"] + (1 + _SMALL_PARTS) * later


def copy_seconds(run: PlannedRun) -> dict[str, float]:
    """Return the seconds of an iteration in which nothing but copies from the host runs, by stage:
    what the partner has outside of its blocks, the VAE for each batch, and for the scores once the
    scorers, there and back, and the policy.
    """
    settings, placements = run.settings, run.config.placements
    rate = run.hardware.host_link * 1e9
    batches = settings.gradient_accumulation_steps
    partner = expert_weights(run, settings.partner_weight_dtype)
    outer = partner.copied(placements.partner, uses=batches, forwards=0)
    vae = vae_weights(run).copied(placements.vae, uses=batches, forwards=0)
    policy = Weights(frozen_bytes(run))
    scorers = Weights(run.reward_bytes).copied(placements.scorers, uses=2, forwards=0)
    returning = policy.copied(placements.policy, uses=1, forwards=0)
    return {
        "rollout": outer / rate if run.config.trained_expert else 0.0,
        "decode": vae / rate,
        "reward": scorers / (_PAGEABLE * rate) + returning / rate,
    }


def forward_seconds(run: PlannedRun) -> float:
    """Return the seconds of a forward pass of the policy for one video and branch on a rank."""
    forward, _ = _traffic(run)
    computing = _seconds(run, run.forward.total, forward)
    settings = run.settings
    return computing + dequantization_seconds(run, settings.base_weight_dtype, settings.batch_size)


def _partner(run: PlannedRun) -> float:
    """Return the seconds of a forward pass of the partner, whose blocks may come from the host."""
    settings = run.settings
    computing = _seconds(run, run.forward.total, _TRAFFIC[0])
    computing += dequantization_seconds(run, settings.partner_weight_dtype, settings.batch_size)
    weights = expert_weights(run, settings.partner_weight_dtype)
    copied = weights.copied(run.config.placements.partner, uses=0, forwards=1)
    copied /= run.samples_at_once(settings.batch_size)
    return max(computing, copied / (run.hardware.host_link * 1e9))


def dequantization_seconds(run: PlannedRun, weight_dtype: str, num_videos: int) -> float:
    """Return the seconds in which a forward pass of ``num_videos`` dequantizes its matrices, for one
    video and branch.
    """
    if weight_dtype != "fp8":
        return 0.0
    size = _DEQUANTIZED[run.settings.enable_compile] * run.parameters.matrices
    samples = run.samples_at_once(num_videos)
    return size / samples / (run.hardware.bandwidth * 1e12)


def training_seconds(run: PlannedRun) -> float:
    """Return the seconds of a training forward and backward pass for one video and branch."""
    forward, backward = _traffic(run)
    forwards = 1 if resolve_auto(run).checkpointing == "none" else 2
    slower = _ATTENTION_BACKWARD * (1 / _BACKWARD_RATE - 1) * run.forward.attention
    computing = _seconds(run, training_flops(run).total + slower, forwards * forward + backward)
    # the backward pass dequantizes once more
    dequantizing = dequantization_seconds(
        run, run.settings.base_weight_dtype, run.settings.mini_batch_size_per_update
    )
    return computing + (forwards + 1) * dequantizing


def decode_seconds(run: PlannedRun) -> float:
    """Return the seconds to decode one video."""
    is_float32 = run.settings.vae_dtype == "fp32"
    share = _FLOAT32_CONVOLUTIONS if is_float32 else _CONVOLUTIONS
    return decode_flops(run) / (share * run.hardware.rate * 1e12)


def score_seconds(run: PlannedRun) -> float:
    """Return the seconds to score one video by the scorers of the reward."""
    return _seconds_of_scorers(run, run.settings.reward_model)


def _seconds_of_scorers(run: PlannedRun, names: list[str]) -> float:
    seconds = 0.0
    for name, share in (("hpsv3", _HPSV3), ("videoalign", _VIDEOALIGN)):
        if name in names:
            flops = scoring_flops(
                run.config.reward, [name], run.settings.sample_n_frames, run.settings.fps
            )
            seconds += flops / (share * run.hardware.rate * 1e12)
    return seconds


def gather_seconds(run: PlannedRun) -> dict[str, float]:
    """Return the seconds in which the ranks receive sharded weights and send gradients, by stage.

    FSDP gathers all weights in each call of the transformer, and again in its backward pass. A call
    computes one video and branch, or with ``batched_forward`` all of a batch. Data from another
    node arrives once for all GPUs of a node.
    """
    rollouts, settings = run.rollouts_per_replica, run.settings
    update_size = settings.mini_batch_size_per_update
    sampled = rollouts * run.sampled_forwards / run.samples_at_once(settings.batch_size)
    compared = rollouts * run.compared_forwards / run.samples_at_once(update_size)
    trained = rollouts * run.forwards_with_gradient / run.samples_at_once(update_size)
    weights = run.parameters.total * run.compute_bytes
    if not settings.reshard_after_forward:
        # The weights stay gathered until a backward pass frees them.
        sampled, compared = min(1, sampled), min(1, compared)
    # a LoRA's gradients are reduced in the last backward pass of an update only
    reductions = run.config.objective.updates if settings.lora_rank else trained
    sizes = {
        "rollout": sampled * weights,
        "anchor": compared * weights,
        "update": (2 if settings.reshard_after_forward else 1) * trained * weights
        + reductions * 4 * trained_parameters(run),
    }
    return {stage: _ring_seconds(run, size) for stage, size in sizes.items()}


def _ring_seconds(run: PlannedRun, size: float) -> float:
    """Return the seconds to gather or reduce ``size`` bytes among the shards, by the slowest link."""
    within = size * (run.num_shards - 1) / run.num_shards / (run.hardware.link * 1e9)
    nodes = math.ceil(run.num_shards / run.hardware.gpus_per_node)
    between = size * (nodes - 1) / run.num_shards / (run.hardware.network * 1e9)
    return max(within, between)


def _traffic(run: PlannedRun) -> tuple[float, float]:
    return _LORA_TRAFFIC if run.settings.lora_rank else _TRAFFIC


def _seconds(run: PlannedRun, flops: float, traffic: float) -> float:
    """Return the seconds of a rank for its part of the FLOPs, and for the traffic of all blocks."""
    computing = flops / run.settings.sp_size / (run.hardware.rate * 1e12)
    inputs = tokens_outside_attention(run) * run.architecture.width * run.compute_bytes
    size = traffic * inputs * run.architecture.num_layers
    return computing + size / (run.hardware.bandwidth * 1e12)


def _videos_to_decode(run: PlannedRun) -> int:
    """Return the videos that a rank decodes in an iteration; a sequence-parallel group shares the
    videos of a batch.
    """
    shared = math.ceil(run.settings.batch_size / run.settings.sp_size)
    return shared * run.settings.gradient_accumulation_steps


def _decodings(run: PlannedRun) -> int:
    """Return how often a rollout is decoded, a backward pass included.

    With a gradient, it is decoded for the score, again by tile and by residual block, and backward
    for as long as twice.
    """
    if not run.config.objective.scores_rollouts:
        return 0
    return 1 + 3 + 2 if run.plan.num_reward_steps else 1


def _tiled(side: int, tile: int, overlap: float) -> int:
    """Return the total number of latent rows of all tiles along a side."""
    if not tile or side <= tile:
        return side
    step = max(1, int(tile * (1 - overlap)))
    return sum(min(tile, side - start) for start in range(0, side, step))
