"""Parallelization of a transformer: sequence parallelism, activation checkpointing, compile and
FSDP2, in that order.

Adapters must exist already. Checkpointing is compiled with the block, since it must see attention's
output to save it.
"""

import functools
import os
import types

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sequence_parallel import SplitSequence
from hyvideo.models import attention
from hyvideo.models.family import blocks, install

# Outputs saved by "selective": attention is 80 % of a forward pass's FLOPs at 480p and 121 frames,
# and its output is one tensor per block. FlashAttention 3 uses the name of torch's operator; the
# math fallback has no such operator.
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
# Blocks of several kinds, each with and without gradient, checkpointing and adapter; torch's
# default is 8.
_RECOMPILE_LIMIT = 64
# Environment variable: "false" compiles without rounding to bf16 between fused operations, for
# checks on a torch whose Triton fails on it. The log-ratio of a compiled model may then differ from
# 0.
PRECISION_CASTS = "COMPILE_PRECISION_CASTS"


def parallelize(
    transformer: nn.Module,
    mesh: Mesh,
    *,
    recompute: str = "none",  # none, full (whole blocks) or selective (all except attention)
    compile: bool = False,
    compile_backend: str = "inductor",
    # later hooks on a block's forward pass, as for offloading, are then not compiled
    is_hooked: bool = False,
    shard: bool = False,  # shard parameters, gradients and optimizer state with FSDP2
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Parallelize ``transformer`` in place. It may be on the meta device."""
    if mesh.sp_size > 1:
        assert mesh.sp_size <= transformer.config.num_attention_heads, (
            "sp_size exceeds the number of attention heads"
        )
        install(transformer, SplitSequence(mesh.sp_group))
    if recompute != "none":
        _recompute(transformer, recompute)
    if compile:
        _compile(transformer, compile_backend, is_hooked)
    if shard:
        _shard(transformer, mesh, compute_dtype, reshard_after_forward=reshard_after_forward)


def _recompute(transformer: nn.Module, kind: str) -> None:
    """Apply activation checkpointing inside each block's forward, so that compile sees it and
    FSDP's hooks wrap it.
    """
    for block in blocks(transformer):
        if not hasattr(block, "original_forward"):  # if called again, only the kind changes
            block.original_forward = block.forward
            block.forward = types.MethodType(_forward, block)
    transformer.enable_gradient_checkpointing(lambda block, *inputs: block(*inputs, recompute=kind))


def _forward(block: nn.Module, *inputs, recompute: str = "none"):
    if recompute == "none":
        return block.original_forward(*inputs)
    if recompute == "selective":
        save_attention = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(
            block.original_forward, *inputs, use_reentrant=False, context_fn=save_attention
        )
    return checkpoint(block.original_forward, *inputs, use_reentrant=False)


def _policy(_context, operator, *_arguments, **_options) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if operator in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _compile(transformer: nn.Module, backend: str, is_hooked: bool) -> None:
    """Compile each block: one graph for all blocks of a kind, if the texts of a batch have equal
    lengths.

    Rollout and update must compute the same numbers, but kernels are fused differently with and
    without gradient. Therefore values are rounded to bf16 where eager mode rounds them, and
    Inductor chooses kernels deterministically. Shapes are dynamic from the first call, so that no
    kernels are specialized for the first text length. Numbers such as an epsilon are constant; as
    inputs of the graph, they would make torch trace each block twice.
    """
    attention.leave_out_of_graphs()
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    torch._dynamo.config.specialize_float = True
    torch._inductor.config.emulate_precision_casts = (
        os.environ.get(PRECISION_CASTS, "true") != "false"
    )
    torch._inductor.config.deterministic = True
    for block in blocks(transformer):
        if is_hooked:
            block.forward = torch.compile(block.forward, backend=backend, dynamic=True)
        else:
            block.compile(backend=backend, dynamic=True)


def _shard(
    transformer: nn.Module, mesh: Mesh, compute_dtype: torch.dtype, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2 to each block and to the root module.

    Inputs are not cast: bf16 would round timestep 937 to 936. Gradients are reduced in float32. The
    root is resharded after a forward pass too, because an anchor swapped into the shards would have
    no effect on gathered parameters.
    """
    param_dtype = None if compute_dtype == torch.float32 else compute_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in (*blocks(transformer), transformer):
        fully_shard(
            part, mesh=mesh.shards, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )


def prepare_backward(transformer: nn.Module, *, is_last: bool, only_last: bool) -> None:
    """Reduce gradients over the ranks in the next backward pass; with ``only_last``, only in the
    last of an update.

    Without reduction, a rank keeps unsharded gradients. Between model replicas, only the last pass
    reduces.
    """
    if isinstance(transformer, FSDPModule):
        transformer.set_is_last_backward(is_last)
        transformer.set_requires_gradient_sync(is_last or not only_last)
        transformer.set_requires_all_reduce(is_last)
