"""Weights into a sharded model: one rank reads, every rank keeps its shard, and nobody holds the whole."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def fill_shards(model: nn.Module, weights: Iterator[tuple[str, Tensor]], *, device: torch.device) -> None:
    """Gives a model on the meta device its memory on ``device`` and its weights from the first rank's files.

    A rank's peak beyond its shards is one whole tensor.

    Args:
        model: Built without memory, then given to ``fully_shard``.
        weights: ``loading.stream_transformer``'s, with ``read`` on the first rank alone; names and order are the
            same on every rank. Adapters get none: their values are the caller's.
    """
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not buffers, f"buffers outside the state dict have no values: {buffers}"
    model.to_empty(device=device)
    # peft puts the adapted layer one level deeper.
    state = model.state_dict().items()
    targets = {name.replace(".base_layer.", "."): tensor for name, tensor in state if ".lora_" not in name}
    missing = set(targets)
    for name, weight in weights:
        target = targets[name]
        whole = weight.to(device, target.dtype) if not weight.is_meta else None
        if whole is None:
            whole = torch.empty(weight.shape, dtype=target.dtype, device=device)
        if isinstance(target, DTensor):
            shard = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=0)
            target.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(whole, src=0)
            target.copy_(whole)
        missing.discard(name)
    assert not missing, f"no weights came for {sorted(missing)}"
