"""Bytes of activations on one rank: tokens x width x bytes x how many tensors of that size a block keeps.

Image tokens are split over the ranks of a sequence-parallel group, text tokens are not; inside attention both are
whole and the heads are split.
"""

import math
from dataclasses import dataclass

from hyvideo.config.memory.model_sizes import Architecture
from hyvideo.config.memory.run_shape import RunShape

# What a block keeps of every token for its backward pass, in tensors of the model's width, computing precision:
#   3  the residual stream, normalised, modulated: input of the projections
#   4  query and key before and after their norm
#   3  query, key and value as attention reads them, image and text joined
#   2  attention's output, and as the output projection reads it
#   1  output projection, for the gradient of its gate
#   3  residual stream, normalised, modulated, before the MLP
#   1  output of the MLP, for the gradient of its gate
# and the MLP's hidden layer twice, before and after GELU.
_KEPT_WIDTHS = 17
_KEPT_HIDDEN = 2
_KEPT_FLOAT32_WIDTHS = 2  # query and key inside their norm, in float32
# Gradients that exist together with all of the above, in widths. Calibrated on the simulation.
_BACKWARD_WIDTHS = 3
# Without gradient, on top of the MLP's hidden layer before and after GELU: the residual stream, and what autocast has
# in float32 of the normalised one. Calibrated on this project's forward pass under autocast (tests/config/memory).
_INFERENCE_WIDTHS = 7


@dataclass(frozen=True)
class Tokens:
    """Tokens that one rank holds of one sample."""

    image: int  # of the whole video
    text: int
    sp_size: int
    head_share: float  # part of the heads that the first rank has

    @property
    def outside_attention(self) -> float:
        return self.image / self.sp_size + self.text

    @property
    def inside_attention(self) -> float:
        """Tokens of all heads that are as many values: the rank has all tokens and a part of the heads."""
        return (self.image + self.text) * self.head_share


def tokens_of(shape: RunShape, architecture: Architecture) -> Tokens:
    """Tokens on the rank that has most."""
    image = architecture.image_tokens(shape.frames, shape.height, shape.width)
    head_share = math.ceil(architecture.num_heads / shape.sp_size) / architecture.num_heads
    return Tokens(image, shape.text_tokens, shape.sp_size, head_share)


def kept_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes that all blocks keep from the forward pass to the backward pass."""
    tokens = tokens_of(shape, architecture)
    samples = shape.mini_batch_size_per_update * shape.num_branches
    line = architecture.width * shape.compute_bytes
    if shape.activation_checkpointing == "none":
        per_block = tokens.outside_attention * _block_line(shape, architecture)
    else:
        per_block = tokens.outside_attention * line  # the block's input
    if shape.activation_checkpointing == "selective":
        per_block += tokens.inside_attention * line
    return architecture.num_layers * samples * per_block


def block_bytes(shape: RunShape, architecture: Architecture) -> float:
    """Bytes that the backward pass of one block holds on top: its recomputed inside, and gradients."""
    tokens = tokens_of(shape, architecture)
    branches = shape.num_branches if shape.batch_guidance else 1
    line = architecture.width * shape.compute_bytes
    per_token = _BACKWARD_WIDTHS * line
    if shape.activation_checkpointing != "none":
        per_token += _block_line(shape, architecture) - line  # the input is kept anyway
    return shape.mini_batch_size_per_update * branches * tokens.outside_attention * per_token


def inference_bytes(shape: RunShape, architecture: Architecture, samples: int) -> float:
    """Bytes that a forward pass without gradient holds at most, in the MLP or in attention, for ``samples`` videos."""
    branches = shape.num_branches if shape.batch_guidance else 1
    widths = _INFERENCE_WIDTHS + 2 * architecture.mlp_ratio
    line = widths * architecture.width * shape.compute_bytes
    return samples * branches * tokens_of(shape, architecture).outside_attention * line


def _block_line(shape: RunShape, architecture: Architecture) -> float:
    """Bytes that a block keeps of one token."""
    computed = (_KEPT_WIDTHS + _KEPT_HIDDEN * architecture.mlp_ratio) * shape.compute_bytes
    return architecture.width * (computed + _KEPT_FLOAT32_WIDTHS * 4)
