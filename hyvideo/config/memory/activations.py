"""Bytes of activations on one rank: tokens x width x bytes x how many tensors of that size a block keeps.

Image tokens are split over the ranks of a sequence-parallel group, text tokens are not; inside attention both are
whole and the heads are split.
"""

import math

from hyvideo.config.memory.planned_run import PlannedRun


def tokens_outside_attention(run: PlannedRun) -> float:
    """Tokens of a sample on a rank: its part of the image, and the whole text."""
    return run.image_tokens / run.settings.sp_size + run.block_text_tokens


def tokens_inside_attention(run: PlannedRun) -> float:
    """Tokens of all heads that are as many values as all tokens of the first rank's heads."""
    heads = run.architecture.num_attention_heads
    return (run.image_tokens + run.block_text_tokens) * (math.ceil(heads / run.settings.sp_size) / heads)


def kept_bytes(run: PlannedRun) -> float:
    """Bytes that all blocks keep from the forward pass to the backward pass."""
    samples = run.settings.mini_batch_size_per_update * run.config.num_branches
    if run.checkpointing == "none":
        per_block = tokens_outside_attention(run) * run.architecture.kept_widths
    else:
        per_block = tokens_outside_attention(run)  # the block's input
    if run.checkpointing == "selective":
        per_block += run.architecture.num_attentions * tokens_inside_attention(run)
    return run.architecture.num_layers * samples * per_block * _width_bytes(run)


def block_bytes(run: PlannedRun) -> float:
    """Bytes that the backward pass of one block holds on top: its recomputed inside, and gradients."""
    widths = run.architecture.backward_widths + _adapted_widths(run)
    if run.checkpointing != "none":
        widths += run.architecture.kept_widths
    samples = run.samples_at_once(run.settings.mini_batch_size_per_update)
    return samples * tokens_outside_attention(run) * widths * _width_bytes(run)


def inference_bytes(run: PlannedRun, samples: int) -> float:
    """Bytes that a forward pass without gradient holds at most, in the MLP or in attention, for ``samples`` videos."""
    widths = run.architecture.inference_widths + _adapted_widths(run)
    return run.samples_at_once(samples) * tokens_outside_attention(run) * widths * _width_bytes(run)


def _adapted_widths(run: PlannedRun) -> float:
    """Widths of what an adapter adds to the MLP's hidden layer: as much again."""
    return run.architecture.mlp_ratio if run.settings.lora_rank else 0.0


def _width_bytes(run: PlannedRun) -> int:
    """Bytes of a tensor of the model's width, of one token."""
    return run.architecture.width * run.compute_bytes
