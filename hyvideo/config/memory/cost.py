"""Floating-point operations of an iteration and a validation, and the seconds they take at a given rate.

    forward = 2 x tokens x parameters of a token's stream  +  4 x tokens^2 x width, in each block

Modulation and embedders are run once per video and are left out: less than a thousandth. A training forward-backward
counts as 3 forwards and what is recomputed: 4 with full checkpointing and 3 without, as in `run_plan.training_forwards`
(and the metric `cost/forwards`), which rounds selective checkpointing to 3: here it is 3.1 to 3.4 at full size.
"""

import math
from dataclasses import dataclass

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.planned_run import PlannedRun

# Of the released VAE's decoder, per pixel and frame: 1.24 PFLOP for 121 frames of 480 x 848, counted by torch.
_DECODE_FLOPS = 25.1e6
# TFLOP/s of bf16 that an H100 or H800 is taken to reach, half of what matrix products alone do there. Not measured.
EXPECTED_RATE = 400.0


@dataclass(frozen=True)
class Forward:
    """FLOPs of one evaluation of the transformer for one video and one branch."""

    image: float  # linear layers on image tokens
    text: float  # linear layers on text tokens, repeated on every rank of a sequence-parallel group
    attention: float

    @property
    def total(self) -> float:
        return self.image + self.text + self.attention


@dataclass(frozen=True)
class Cost:
    """FLOPs of one iteration of the whole run."""

    forward: Forward
    forwards_per_rollout: float  # in all branches: of its steps, its anchor means and its training
    rollouts: int
    decode_flops: float  # per video

    @property
    def flops(self) -> float:
        return self.rollouts * (self.forwards_per_rollout * self.forward.total + self.decode_flops)


def forward_flops(image_tokens: int, text_tokens: int, architecture: Architecture) -> Forward:
    """FLOPs of one forward over so many tokens."""
    per_token = 2 * architecture.num_layers * architecture.token_parameters
    attention = 4 * (image_tokens + text_tokens) ** 2 * architecture.width * architecture.num_layers
    return Forward(per_token * image_tokens, per_token * text_tokens, attention)


def cost(run: PlannedRun) -> Cost:
    """FLOPs of an iteration of this run."""
    forward = forward_flops(run.image_tokens, run.text_tokens, run.architecture)
    # Selective checkpointing computes all but attention again.
    selective = (forward.image + forward.text) / forward.total
    training = 3 + {"none": 0.0, "selective": selective, "full": 1.0}[run.checkpointing]
    anchor = run.num_trained_steps if run.config.needs_anchor else 0
    forwards = run.settings.grpo_sampling_steps + training * run.num_trained_steps + anchor
    rollouts = run.replicas * run.rollouts_per_replica
    return Cost(forward, run.config.num_branches * forwards, rollouts, decode_flops(run))


def decode_flops(run: PlannedRun) -> float:
    """FLOPs of decoding one video; what neighbouring tiles share is decoded twice."""
    ratio = run.architecture.spatial_compression_ratio
    covered, *sides = run.config.rollout_size
    for side in sides:
        covered *= _tiled(side // ratio, run.settings.vae_tile_size // ratio, run.settings.vae_tile_overlap) * ratio
    relative = run.architecture.block_out_channels[0] / Architecture.block_out_channels[0]
    return _DECODE_FLOPS * relative**2 * covered


def seconds(run: PlannedRun, tflops_per_second: float) -> float:
    """Seconds of one iteration at a GPU's rate. The ranks of a sequence-parallel group share its decoding."""
    spent = cost(run)
    decoded = math.ceil(run.settings.batch_size / run.settings.sp_size) * run.settings.gradient_accumulation_steps
    flops = run.rollouts_per_replica * spent.forwards_per_rollout * _forward_of_a_rank(run)
    return (flops + decoded * spent.decode_flops) / (tflops_per_second * 1e12)


def validation_seconds(run: PlannedRun, num_videos: int, tflops_per_second: float) -> float:
    """Seconds of one validation of so many videos, which the replicas share; 0 where nothing is validated."""
    if not (sampling := run.validation):
        return 0.0
    videos, batch = math.ceil(num_videos / run.replicas), sampling.settings.batch_size
    decoded = sum(math.ceil(min(batch, videos - done) / run.settings.sp_size) for done in range(0, videos, batch))
    forwards = videos * sampling.settings.grpo_sampling_steps * run.config.num_branches
    flops = forwards * _forward_of_a_rank(sampling) + decoded * decode_flops(sampling)
    return flops / (tflops_per_second * 1e12)


def _forward_of_a_rank(run: PlannedRun) -> float:
    """FLOPs of a rank in a forward: its part of the image's and attention's, and all of the text's."""
    forward, sp_size = forward_flops(run.image_tokens, run.text_tokens, run.architecture), run.settings.sp_size
    return (forward.image + forward.attention) / sp_size + forward.text


def _tiled(side: int, tile: int, overlap: float) -> int:
    """Latent rows that the tiles along a side cover together."""
    if not tile or side <= tile:
        return side
    step = max(1, int(tile * (1 - overlap)))
    return sum(min(tile, side - start) for start in range(0, side, step))
