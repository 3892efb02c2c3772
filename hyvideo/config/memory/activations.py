"""Bytes of activations on one rank: tokens x width x bytes x how many tensors of that size a block keeps.

Image tokens are split over the ranks of a sequence-parallel group, text tokens are not; inside attention both are
whole and the heads are split.
"""

import math

from hyvideo.config.memory.planned_run import PlannedRun

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


def tokens_outside_attention(run: PlannedRun) -> float:
    """Tokens of a sample on a rank: its part of the image, and the whole text."""
    return run.image_tokens / run.settings.sp_size + run.text_tokens


def tokens_inside_attention(run: PlannedRun) -> float:
    """Tokens of all heads that are as many values as all tokens of the first rank's heads."""
    heads = run.architecture.num_attention_heads
    return (run.image_tokens + run.text_tokens) * (math.ceil(heads / run.settings.sp_size) / heads)


def kept_bytes(run: PlannedRun) -> float:
    """Bytes that all blocks keep from the forward pass to the backward pass."""
    samples = run.settings.mini_batch_size_per_update * run.config.num_branches
    line = run.architecture.width * run.compute_bytes
    if run.checkpointing == "none":
        per_block = tokens_outside_attention(run) * _block_line(run)
    else:
        per_block = tokens_outside_attention(run) * line  # the block's input
    if run.checkpointing == "selective":
        per_block += tokens_inside_attention(run) * line
    return run.architecture.num_layers * samples * per_block


def block_bytes(run: PlannedRun) -> float:
    """Bytes that the backward pass of one block holds on top: its recomputed inside, and gradients."""
    line = run.architecture.width * run.compute_bytes
    per_token = _BACKWARD_WIDTHS * line
    if run.checkpointing != "none":
        per_token += _block_line(run) - line  # the input is kept anyway
    samples = run.samples_at_once(run.settings.mini_batch_size_per_update)
    return samples * tokens_outside_attention(run) * per_token


def inference_bytes(run: PlannedRun, samples: int) -> float:
    """Bytes that a forward pass without gradient holds at most, in the MLP or in attention, for ``samples`` videos."""
    line = (_INFERENCE_WIDTHS + 2 * run.architecture.mlp_ratio) * run.architecture.width * run.compute_bytes
    return run.samples_at_once(samples) * tokens_outside_attention(run) * line


def _block_line(run: PlannedRun) -> float:
    """Bytes that a block keeps of one token."""
    computed = (_KEPT_WIDTHS + _KEPT_HIDDEN * run.architecture.mlp_ratio) * run.compute_bytes
    return run.architecture.width * (computed + _KEPT_FLOAT32_WIDTHS * 4)
