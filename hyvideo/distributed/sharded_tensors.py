"""Parameters that may be sharded: this rank's part, the whole, and weights into the shards from one rank's files."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, value: Tensor) -> None:
    """Puts a tensor that every rank has whole into a sharded one, without a message."""
    value = value.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None).to_local()
    local(target).copy_(value)


def like(template: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's share of a tensor that is sharded as ``template`` is."""
    if not isinstance(template, DTensor):
        return part
    return DTensor.from_local(
        part, template.device_mesh, template.placements, run_check=False, shape=template.shape, stride=template.stride()
    )


def reshard(model: nn.Module) -> None:
    """Lets go of gathered parameters, so that the next forward gathers what the shards hold then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def fill_shards(model: nn.Module, weights: Iterator[tuple[str, Tensor]], *, device: torch.device) -> None:
    """Gives a model on the meta device its memory on ``device`` and its weights from the first rank's files.

    One rank reads, every rank keeps its shard: beyond its shards a rank holds at most one whole tensor.

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
        if weight.is_meta:  # on the ranks that do not read
            full = torch.empty(weight.shape, dtype=target.dtype, device=device)
        else:
            full = weight.to(device, target.dtype)
        if isinstance(target, DTensor):
            shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=0)
            target.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(full, src=0)
            target.copy_(full)
        missing.discard(name)
    assert not missing, f"no weights came for {sorted(missing)}"
