"""Floating-point operations of an iteration, and the seconds they take at a given rate.

    forward = 2 x tokens x parameters of a token's stream  +  4 x tokens^2 x width, in each block

Modulation and embedders are run once per video and are left out: less than a thousandth. A training forward-backward
counts as 3 forwards and what is recomputed: 4 with full checkpointing and 3 without, as in `run_plan.training_forwards`
(and the metric `cost/forwards`), which rounds selective checkpointing to 3: here it is 3.1 to 3.4 at full size.
"""

import math
from dataclasses import dataclass

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.run_shape import RunShape

# Of the released VAE's decoder, per pixel and frame: 1.24 PFLOP for 121 frames of 480 x 848, counted by torch.
_DECODE_FLOPS = 25.1e6


@dataclass(frozen=True)
class Forward:
    """FLOPs of one evaluation of the transformer for one video and one branch."""

    image: float  # linear layers on image tokens
    text: float  # linear layers on text tokens, repeated on every rank of a sequence-parallel group
    attention: float

    @property
    def total(self) -> float:
        return self.image + self.text + self.attention

    @property
    def recomputed_fraction(self) -> float:
        """Share that selective checkpointing computes again: all but attention."""
        return (self.image + self.text) / self.total


@dataclass(frozen=True)
class Cost:
    """FLOPs of one iteration of the whole run."""

    forward: Forward
    forwards_per_rollout: float  # a training forward and backward counted as 3, and what is recomputed on top
    rollouts: int
    decode_flops: float  # per video
    replicated_flops: float  # text computed again by the other ranks of a sequence-parallel group, per rollout

    @property
    def flops(self) -> float:
        return self.rollouts * (self.forwards_per_rollout * self.forward.total + self.decode_flops)


def forward_flops(image_tokens: int, text_tokens: int, architecture: Architecture) -> Forward:
    """FLOPs of one forward over so many tokens."""
    per_token = 2 * architecture.num_layers * architecture.token_parameters
    attention = 4 * (image_tokens + text_tokens) ** 2 * architecture.width * architecture.num_layers
    return Forward(per_token * image_tokens, per_token * text_tokens, attention)


def cost(shape: RunShape, architecture: Architecture) -> Cost:
    """FLOPs of an iteration of this run."""
    tokens = architecture.image_tokens(shape.frames, shape.height, shape.width)
    forward = forward_flops(tokens, shape.text_tokens, architecture)
    forwards = forwards_per_rollout(shape, forward)
    return Cost(
        forward=forward,
        forwards_per_rollout=forwards,
        rollouts=shape.replicas * shape.rollouts_per_replica,
        decode_flops=decode_flops(shape, architecture),
        replicated_flops=forwards * forward.text * (shape.sp_size - 1),
    )


def forwards_per_rollout(shape: RunShape, forward: Forward) -> float:
    """Transformer evaluations of a rollout, its anchor means and its training, in each branch."""
    recomputed = {"none": 0.0, "selective": forward.recomputed_fraction, "full": 1.0}
    training = 3 + recomputed[shape.activation_checkpointing]
    anchor = shape.trained_steps if shape.has_anchor else 0
    return shape.num_branches * (shape.grpo_sampling_steps + training * shape.trained_steps + anchor)


def decode_flops(shape: RunShape, architecture: Architecture) -> float:
    """FLOPs of decoding one video; what neighbouring tiles share is decoded twice."""
    covered = shape.frames
    for side in (shape.height, shape.width):
        covered *= _tiled(side // architecture.vae_spatial, shape, architecture) * architecture.vae_spatial
    relative = architecture.vae_channels[0] / Architecture().vae_channels[0]
    return _DECODE_FLOPS * relative**2 * covered


def seconds(shape: RunShape, architecture: Architecture, tflops_per_second: float) -> float:
    """Seconds of one iteration at a GPU's rate. The ranks of a sequence-parallel group share its decoding."""
    spent = cost(shape, architecture)
    transformer = (spent.forwards_per_rollout * spent.forward.total + spent.replicated_flops) / shape.sp_size
    decoded = math.ceil(shape.batch_size / shape.sp_size) * shape.gradient_accumulation_steps
    flops = shape.rollouts_per_replica * transformer + decoded * spent.decode_flops
    return flops / (tflops_per_second * 1e12)


def _tiled(side: int, shape: RunShape, architecture: Architecture) -> int:
    """Latent rows that the tiles along a side cover together."""
    tile = shape.vae_tile_size // architecture.vae_spatial
    if not tile or side <= tile:
        return side
    step = max(1, int(tile * (1 - shape.vae_tile_overlap)))
    return sum(min(tile, side - start) for start in range(0, side, step))
