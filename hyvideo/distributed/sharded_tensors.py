"""Parameters that may be sharded: this rank's part, the whole, and weights into the shards from one rank's files."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hyvideo.distributed.mesh import Mesh


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


def holders(tensors: Iterable[Tensor], mesh: Mesh) -> "dist.ProcessGroup | None":
    """Group of the ranks that hold the same parts of these tensors as this one does; None where each has its own."""
    sharded = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh.world_size == 1:
        return None
    if sharded is None:
        return dist.group.WORLD
    return sharded.device_mesh.get_group(0) if sharded.device_mesh.ndim > 1 else None


def divide(tensors: Sequence[Tensor], group: "dist.ProcessGroup | None") -> list[int]:
    """A rank of the group for each tensor, so that all have about as many bytes in a row."""
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    num_ranks = dist.get_world_size(group) if group else 1
    return [(end - tensor.nbytes) * num_ranks // max(1, ends[-1]) for end, tensor in zip(ends, tensors)]


@torch.no_grad()
def fill_shards(model: nn.Module, weights: Iterator[tuple[str, Tensor]], *, device: torch.device) -> None:
    """Gives a model on the meta device, sharded or not, memory on ``device`` and the weights that the first rank reads.

    One rank reads, and every rank keeps its shard: beyond its shards a rank holds at most one whole tensor. Between the
    replicas of the model only shards are sent.

    Args:
        model: Built without memory, then perhaps given to ``fully_shard``.
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
        missing.discard(name)
        if not isinstance(target, DTensor):
            if not weight.is_meta:  # on the rank that reads
                target.copy_(weight)
            if dist.is_initialized():
                dist.broadcast(target, src=0)
            continue
        mesh, part = target.device_mesh, target.to_local()
        has_replicas = mesh.ndim > 1
        if not has_replicas or mesh.get_local_rank(0) == 0:
            full = (torch.empty_like(weight, device=device) if weight.is_meta else weight).to(device, target.dtype)
            shards = mesh[mesh.mesh_dim_names[1]] if has_replicas else mesh
            part.copy_(distribute_tensor(full, shards, target.placements[-1:], src_data_rank=0).to_local())
        if has_replicas:
            dist.broadcast(part, group=mesh.get_group(0), group_src=0)
    assert not missing, f"no weights came for {sorted(missing)}"
