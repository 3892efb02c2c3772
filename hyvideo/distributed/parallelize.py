"""A transformer for many ranks: sequence parallel, activation checkpointing, compile and FSDP2, in that order.

The order matters: adapters must be there before; compile compiles the checkpointing with the block, because outside of
what is compiled it cannot see attention's result and keep it; FSDP wraps both. Parameter names stay as they were.
"""

import functools
import types

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyvideo.data.outside import shown
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sequence_parallel import SplitSequence
from hyvideo.models.family import blocks, install

# What "selective" keeps: 80 % of a forward's arithmetic at 480p and 121 frames, in one tensor per block. FlashAttention
# 3 runs under the name of torch's own; without a kernel (math) there is nothing to keep.
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
# Of all blocks together: kinds of block, with and without gradient, recomputation, adapter; 8 by default.
_RECOMPILE_LIMIT = 64


def parallelize(
    transformer: nn.Module,
    mesh: Mesh,
    *,
    recompute: str = "none",  # none, full (whole blocks) or selective (all but attention)
    compile: bool = False,
    compile_backend: str = "inductor",
    shard: bool = False,  # parameters, gradients and optimizer state over the ranks, by FSDP2
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Changes ``transformer`` in place. It may be without memory (on the meta device)."""
    if mesh.sp_size > 1:
        assert mesh.sp_size <= transformer.config.num_attention_heads, "checked before anything was loaded"
        install(transformer, SplitSequence(mesh.sp_group))
    if recompute != "none":
        _recompute(transformer, recompute)
    if compile:
        _compile(transformer, compile_backend)
    if shard:
        _shard(transformer, mesh, compute_dtype, reshard_after_forward=reshard_after_forward)


def _recompute(transformer: nn.Module, kind: str) -> None:
    """Checkpointing inside of each block's forward pass, so that compile sees it and FSDP's hooks lie around it."""
    for block in blocks(transformer):
        if not hasattr(block, "forward_once"):  # another kind of recomputation goes through the same method
            block.forward_once, block.forward = block.forward, types.MethodType(_forward, block)
    transformer.enable_gradient_checkpointing(lambda block, *inputs: block(*inputs, recompute=kind))


def _forward(block: nn.Module, *inputs, recompute: str = "none"):
    if recompute == "none":
        return block.forward_once(*inputs)
    keep_attention = functools.partial(create_selective_checkpoint_contexts, _policy)
    contexts = {"context_fn": keep_attention} if recompute == "selective" else {}
    return checkpoint(block.forward_once, *inputs, use_reentrant=False, **contexts)


def _policy(_context, operator, *_arguments, **_options) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _compile(transformer: nn.Module, backend: str) -> None:
    """Compiles each block into one graph, unless the texts of a batch are unequal; blocks of a kind share it.

    Rollout and update must give the same numbers. So values are rounded to bf16 where eager rounds them, not only
    where a fused kernel ends: the kernels with and without gradient end elsewhere. And shapes are dynamic from the
    first call: a first length of text with kernels of its own would be computed by those or by the others. Where
    inductor can, it chooses kernels by rule: one that a stopwatch chose could be another with gradient, or on a rank.
    """
    if backend not in (known := [*torch._dynamo.list_backends(), "aot_eager", "eager"]):
        raise ValueError(f"compile_backend must be one of {', '.join(known)}, got {shown(backend)}")
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    torch._inductor.config.emulate_precision_casts = True
    torch._inductor.config.deterministic = True
    for block in blocks(transformer):
        block.compile(backend=backend, dynamic=True)


def _shard(transformer: nn.Module, mesh: Mesh, compute_dtype: torch.dtype, *, reshard_after_forward: bool) -> None:
    """FSDP2 for each block and for what is left.

    Inputs are not cast: bf16 would round the timestep 937 to 936. Gradients are reduced in float32. The root is
    resharded after a forward too: whole parameters that stay would hide an anchor swapped into the shards.
    """
    param_dtype = None if compute_dtype == torch.float32 else compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*blocks(transformer), transformer):
        fully_shard(part, mesh=mesh.shards, mp_policy=policy, reshard_after_forward=reshard_after_forward)


class GradientSync:
    """Decides when gradients are reduced over the ranks: with every backward pass, or with the last of an update only.

    Without a reduction a rank keeps whole gradients, which a full-size model has no room for. Between the replicas of
    the model (dp_replicate) it only keeps its shards, so there it is always the last.
    """

    def __init__(self, transformer: nn.Module, *, only_last: bool):
        self._root = transformer if isinstance(transformer, FSDPModule) else None
        self._only_last = only_last

    def before_backward(self, is_last: bool) -> None:
        if self._root is None:
            return
        self._root.set_is_last_backward(is_last)
        if self._only_last:
            self._root.set_requires_gradient_sync(is_last)
        self._root.set_requires_all_reduce(is_last)
