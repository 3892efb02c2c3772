"""Bytes of activations on one rank: tokens x width x bytes x number of such tensors per block.

Sequence parallelism splits the image tokens over ranks; inside attention every rank has all tokens
of some heads.
"""

import math

from hyvideo.planning.planned_run import PlannedRun


def tokens_outside_attention(run: PlannedRun) -> float:
    """Return the tokens of a sample on a rank: its part of the image, and the whole text."""
    return run.image_tokens / run.settings.sp_size + run.block_text_tokens


def tokens_inside_attention(run: PlannedRun) -> float:
    """Return the tokens of a sample inside attention: all of them, times the share of heads of the
    first rank.
    """
    heads = run.architecture.num_attention_heads
    return (run.image_tokens + run.block_text_tokens) * (
        math.ceil(heads / run.settings.sp_size) / heads
    )


def mlp_ratio(run: PlannedRun) -> float:
    """Return the width of the MLP's hidden layer in units of the transformer's width."""
    return run.parameters.largest_matrix / run.architecture.width**2


def saved_widths(run: PlannedRun) -> float:
    """Return the widths that a block saves per token for its backward pass: the MLP's hidden layer
    twice, before and after its activation.
    """
    return run.architecture.memory.saved + 2 * mlp_ratio(run)


def kept_bytes(run: PlannedRun) -> float:
    """Return the bytes that all blocks keep from the forward pass to the backward pass."""
    branches = 2 if run.config.policy_cfg_scale > 1 else 1
    samples = run.settings.mini_batch_size_per_update * branches
    if run.checkpointing == "none":
        per_block = tokens_outside_attention(run) * saved_widths(run)
    else:
        per_block = tokens_outside_attention(run)  # the block's input
    if run.checkpointing == "selective":
        per_block += run.architecture.memory.num_attentions * tokens_inside_attention(run)
    return run.architecture.num_layers * samples * per_block * _width_bytes(run)


def block_bytes(run: PlannedRun) -> float:
    """Return the additional bytes of the backward pass of one block: recomputed activations and
    gradients.
    """
    block = run.architecture.memory
    widths = block.backward + block.backward_mlp * mlp_ratio(run) + _adapted_widths(run)
    if run.checkpointing != "none":
        widths += saved_widths(run)
    samples = run.samples_at_once(run.settings.mini_batch_size_per_update)
    return samples * tokens_outside_attention(run) * widths * _width_bytes(run)


def inference_bytes(run: PlannedRun, samples: int) -> float:
    """Return the peak bytes of a forward pass without gradient, in the MLP or attention, for
    ``samples`` videos.
    """
    block = run.architecture.memory
    widths = max(block.inference_at_least, block.inference + 2 * mlp_ratio(run))
    widths += _adapted_widths(run)
    return run.samples_at_once(samples) * tokens_outside_attention(run) * widths * _width_bytes(run)


def _adapted_widths(run: PlannedRun) -> float:
    """Return the additional widths of a LoRA: the hidden layer of the MLP a second time."""
    return mlp_ratio(run) if run.settings.lora_rank else 0.0


def _width_bytes(run: PlannedRun) -> int:
    """Return the bytes of one token of the model's width."""
    return run.architecture.width * run.compute_bytes
