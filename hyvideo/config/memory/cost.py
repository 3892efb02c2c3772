"""Floating-point operations and seconds of an iteration and a validation, for given GPUs and links.

    forward = 2 x tokens x parameters of a token's stream  +  4 x tokens^2 x width, in each block
    seconds = max(sampling, its gathers) + max(training, its gathers and reductions) + decoding + scoring + exchanges

FSDP gathers a block while another is computed, so the longer of computing and gathering counts. A scorer shares the GPU
with the sampling of the next batch: its operations are counted, but nothing waits for it.
"""

import math
from dataclasses import dataclass

from hyvideo.config.memory.network import gathered_bytes, traffic
from hyvideo.config.memory.phases import resolve_auto
from hyvideo.config.memory.planned_run import PlannedRun
from hyvideo.models.sizes import ForwardFlops

# VideoAlign's Qwen2-VL-2B: per second of video, which is one pair of frames and 256 tokens, and for the question.
_SCORE_FLOPS_PER_VIDEO_SECOND = 2 * 256 * (4 * 0.665e9 + 1.31e9)
_SCORE_FLOPS_PER_QUESTION = 2 * 1000 * 1.31e9
ATTENTION_BACKWARD = 2.5  # forwards: five products of the size of its two, as FlashAttention, cuDNN and torch count


@dataclass(frozen=True)
class Cost:
    """FLOPs of one iteration on all ranks."""

    forward: ForwardFlops
    forwards_per_rollout: float  # forward passes of all branches: sampling, anchor means and training
    rollouts: int
    video_flops: float  # to decode and score one video

    @property
    def flops(self) -> float:
        return self.rollouts * (self.forwards_per_rollout * self.forward.total + self.video_flops)


@dataclass(frozen=True)
class Duration:
    """Seconds of an iteration."""

    computing: float
    network: float  # all messages
    waiting: float  # messages that computing does not hide

    @property
    def total(self) -> float:
        return self.computing + self.waiting


def training_forwards(run: PlannedRun) -> float:
    """Return the cost of a training forward and backward in forward passes: 3, plus what is recomputed."""
    forward = run.architecture.forward(run.image_tokens, run.text_tokens)
    linear = (forward.image + forward.text) / forward.total
    return 3 + {"none": 0.0, "selective": linear, "full": 1.0}[resolve_auto(run).checkpointing]


def cost(run: PlannedRun) -> Cost:
    """Return the FLOPs of an iteration of this run."""
    forward = run.architecture.forward(run.image_tokens, run.text_tokens)
    forwards = run.forwards_without_gradient + training_forwards(run) * run.forwards_with_gradient
    return Cost(forward, forwards, run.replicas * run.rollouts_per_replica, decode_flops(run) + scoring_flops(run))


def training_flops(run: PlannedRun) -> ForwardFlops:
    """Return the FLOPs of a training forward and backward pass on one rank, including recomputation, by kind.

    A matrix product's backward pass is one product for the gradient of the input and, except for the frozen weights of
    a LoRA, one for the weights. The products of the LoRA itself, 2 % at rank 32, are not counted.
    """
    forward = run.architecture.forward(run.image_tokens, run.text_tokens).per_rank(run.settings.sp_size)
    kind = resolve_auto(run).checkpointing
    products = (2 if run.settings.lora_rank else 3) + (kind != "none")
    attention = 1 + ATTENTION_BACKWARD + (kind == "full")
    return ForwardFlops(products * forward.image, products * forward.text, attention * forward.attention)


def stage_flops(run: PlannedRun) -> dict[str, float]:
    """Return the FLOPs of one rank in the stages of an iteration, by the names that `StageTimer` measures.

    Counted are matrix products, attention and the convolutions of decoding, as executed: with recomputation. With
    sequence parallelism some ranks may have no video to decode; these are the FLOPs of a rank with most videos.
    """
    forward = run.architecture.forward(run.image_tokens, run.text_tokens).per_rank(run.settings.sp_size).total
    rollouts = run.rollouts_per_replica
    return {
        "rollout": rollouts * run.plan.sampled_branches * run.sampling_forwards * forward,
        "decode": videos_per_rank(run) * decode_flops(run),
        "anchor": rollouts * run.compared_forwards * forward,
        "update": rollouts * run.forwards_with_gradient * training_flops(run).total,
    }


def videos_per_rank(run: PlannedRun) -> int:
    """Return the largest number of videos that a rank decodes; a sequence-parallel group shares those of a batch."""
    return math.ceil(run.settings.batch_size / run.settings.sp_size) * run.settings.gradient_accumulation_steps


def decode_flops(run: PlannedRun) -> float:
    """Return the FLOPs of decoding one video; overlaps of tiles are decoded twice."""
    ratio = run.architecture.spatial_compression_ratio
    covered, *sides = run.config.rollout_size
    for side in sides:
        covered *= _tiled(side // ratio, run.settings.vae_tile_size // ratio, run.settings.vae_tile_overlap) * ratio
    return run.architecture.decode_flops * covered


def scoring_flops(run: PlannedRun) -> float:
    """Return the FLOPs of VideoAlign on one video; 0 with a reward service. Smaller scorers are not counted."""
    reward, data = run.config.reward, run.config.data
    if "videoalign" not in reward.reward_model or reward.remote_reward_url:
        return 0.0
    return _SCORE_FLOPS_PER_VIDEO_SECOND * data.sample_n_frames / data.fps + _SCORE_FLOPS_PER_QUESTION


def duration(run: PlannedRun) -> Duration:
    """Return the seconds of one iteration. The ranks of a sequence-parallel group share decoding and scoring."""
    hardware, spent, sent, sp_size = run.hardware, cost(run), traffic(run), run.settings.sp_size
    rate = hardware.rate * 1e12
    forwards = run.rollouts_per_replica * spent.forward.per_rank(sp_size).total / rate
    sampling = forwards * run.forwards_without_gradient
    training = forwards * training_forwards(run) * run.forwards_with_gradient
    decoding = videos_per_rank(run) * spent.video_flops / rate  # and scoring
    gathering = sent.shards.seconds(sent.sampling, hardware)
    reducing = sent.shards.seconds(sent.training + sent.reduced, hardware)
    reducing += sent.replicas.seconds(sent.averaged, hardware)
    link = hardware.link if sp_size <= hardware.gpus_per_node else hardware.network
    exchanging = sent.exchanged / (link * 1e9)
    waiting = max(0.0, gathering - sampling) + max(0.0, reducing - training) + exchanging
    return Duration(sampling + training + decoding, gathering + reducing + exchanging, waiting)


def validation_seconds(run: PlannedRun, num_videos: int) -> float:
    """Return the seconds of a validation of ``num_videos``, shared by the replicas; 0 without validation."""
    if not (sampling := run.validation):
        return 0.0
    spent, rate, sp_size = cost(sampling), run.hardware.rate * 1e12, run.settings.sp_size
    steps = sampling.settings.grpo_sampling_steps
    videos, batch = math.ceil(num_videos / run.replicas), sampling.settings.batch_size
    decoded = sum(math.ceil(min(batch, videos - done) / sp_size) for done in range(0, videos, batch))
    computing = videos * steps * sampling.plan.sampled_branches * spent.forward.per_rank(sp_size).total / rate
    calls = math.ceil(videos / batch) * steps * sampling.num_calls(batch, sampling.plan.sampled_branches)
    gathering = traffic(run).shards.seconds(calls * gathered_bytes(run), run.hardware)
    return max(computing, gathering) + decoded * spent.video_flops / rate


def _tiled(side: int, tile: int, overlap: float) -> int:
    """Return the total number of latent rows of all tiles along a side."""
    if not tile or side <= tile:
        return side
    step = max(1, int(tile * (1 - overlap)))
    return sum(min(tile, side - start) for start in range(0, side, step))
