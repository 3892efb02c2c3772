"""A transformer for many ranks: sequence parallel, activation checkpointing, compile and FSDP2, in that order.

The order matters: adapters must be there before; checkpointing wraps what compile compiles, and FSDP wraps both.
Parameter names stay as they were.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyvideo.data.outside import shown
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sequence_parallel import SplitSequence
from hyvideo.models.transformer import install

# What "selective" keeps: 80 % of a forward's arithmetic at 480p and 121 frames, in one tensor per block.
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
# Every size of video compiles anew until shapes are dynamic; the default of 8 is reached with the second.
_RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Parallelism:
    """The ways in which a transformer is spread and recomputed."""

    recompute: str = "none"  # none, full (whole blocks) or selective (all but attention)
    compile: bool = False
    compile_backend: str = "inductor"
    shard: bool = False  # parameters, gradients and optimizer state over the ranks, by FSDP2
    reshard_after_forward: bool = True
    compute_dtype: torch.dtype = torch.float32


def parallelize(transformer: nn.Module, mesh: Mesh, how: Parallelism) -> None:
    """Changes ``transformer`` in place. It may be without memory (on the meta device)."""
    if mesh.sp_size > 1:
        assert mesh.sp_size <= transformer.config.num_attention_heads, "checked before anything was loaded"
        install(transformer, SplitSequence(mesh.sp_group))
    if how.recompute == "full":
        transformer.enable_gradient_checkpointing()
    elif how.recompute == "selective":
        transformer.enable_gradient_checkpointing(_keep_attention)
    if how.compile:
        if how.compile_backend not in (known := torch._dynamo.list_backends(exclude_tags=())):
            raise ValueError(f"compile_backend must be one of {', '.join(known)}, got {shown(how.compile_backend)}")
        limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
        setattr(torch._dynamo.config, limit, _RECOMPILE_LIMIT)  # the second until torch 2.6
        for block in transformer.transformer_blocks:
            block.compile(backend=how.compile_backend)  # in one graph, unless the texts of a batch are unequal
    if how.shard:
        _shard(transformer, mesh, how)


def _keep_attention(module: nn.Module, *inputs):
    """Checkpointing that keeps what attention gave and recomputes the rest."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(module, *inputs, use_reentrant=False, context_fn=contexts)


def _policy(_context, operator, *_arguments, **_options) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _shard(transformer: nn.Module, mesh: Mesh, how: Parallelism) -> None:
    """FSDP2 for each block and for what is left.

    Inputs are not cast: bf16 would round the timestep 937 to 936. Gradients are reduced in float32. The root is
    resharded after a forward too: whole parameters that stay would hide an anchor swapped into the shards.
    """
    param_dtype = None if how.compute_dtype == torch.float32 else how.compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*transformer.transformer_blocks, transformer):
        fully_shard(part, mesh=mesh.shards, mp_policy=policy, reshard_after_forward=how.reshard_after_forward)


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
