"""Functions of tensors that may be sharded (DTensor): local shard, full tensor, copying, and
loading of weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hyvideo.distributed.mesh import Mesh
from hyvideo.models.fp8 import Fp8Linear


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor, which every rank holds, into a tensor that may be sharded, without
    communication.
    """
    value = value.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        value = distribute_tensor(
            value, target.device_mesh, target.placements, src_data_rank=None
        ).to_local()
    local_shard(target).copy_(value)


def sharded_like(template: Tensor, part: Tensor) -> Tensor:
    """Return a tensor sharded like ``template``, with ``part`` as this rank's shard."""
    if not isinstance(template, DTensor):
        return part
    return DTensor.from_local(
        part,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next forward pass gathers current shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def replica_group(tensors: Iterable[Tensor], mesh: Mesh) -> "dist.ProcessGroup | None":
    """Return the group of ranks that hold the same shards of these tensors as this rank; None if
    none do.
    """
    sharded = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh.world_size == 1:
        return None
    if sharded is None:
        return dist.group.WORLD
    return sharded.device_mesh.get_group(0) if sharded.device_mesh.ndim > 1 else None


def assign_ranks(tensors: Sequence[Tensor], group: "dist.ProcessGroup | None") -> list[int]:
    """Return a rank of the group for each tensor, consecutive tensors of about equal total size for
    each rank.
    """
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    num_ranks = dist.get_world_size(group) if group else 1
    return [
        (end - tensor.nbytes) * num_ranks // max(1, ends[-1]) for end, tensor in zip(ends, tensors)
    ]


@torch.no_grad()
def fill_shards(
    model: nn.Module,
    weights: Iterator[tuple[str, Tensor]],
    *,
    device: torch.device,
    kept_on: torch.device | None = None,
    is_alone: bool = False,
) -> None:
    """Allocate a model from the meta device and fill it with weights that only the first rank reads.

    Every rank keeps its shards and holds at most one full tensor in addition. ``weights`` are those
    of `loading.stream_transformer`, with ``read`` only on the first rank; the caller initializes
    adapters. The weights of `Fp8Linear` layers are quantized one by one, on ``device``. The model is
    there or, if it is not sharded, on ``kept_on``. A rank that ``is_alone`` reads all weights itself,
    without communication.
    """
    kept_on = kept_on or device
    is_shared = dist.is_initialized() and not is_alone
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not buffers, f"buffers outside the state dict would stay uninitialized: {buffers}"
    # peft nests the adapted layer one level deeper.
    layers = {
        _plain(f"{name}.weight"): part
        for name, part in model.named_modules()
        if isinstance(part, Fp8Linear)
    }
    dtypes = {name: layer.weight.dtype for name, layer in layers.items()}
    for layer in layers.values():
        layer.weight = None  # not allocated before it is quantized
    model.to_empty(device=kept_on)
    targets = {
        _plain(name): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    missing = {*targets, *layers}
    for name, weight in weights:
        missing.discard(name)
        if name in layers:
            layer = layers[name]
            _store(layer, weight, device=device, dtype=dtypes[name], is_shared=is_shared)
            if kept_on != device:
                layer.weight = nn.Parameter(layer.weight.to(kept_on), requires_grad=False)
            continue
        target = targets[name]
        if not isinstance(target, DTensor):
            if not weight.is_meta:  # on the reading rank
                target.copy_(weight)
            if is_shared:
                dist.broadcast(target, src=0)
            continue
        mesh = target.device_mesh
        part = target.to_local()
        has_replicas = mesh.ndim > 1
        if not has_replicas or mesh.get_local_rank(0) == 0:
            if weight.is_meta:  # another rank reads it
                weight = torch.empty_like(weight, device=device)
            full = weight.to(device, target.dtype)
            shards = mesh[mesh.mesh_dim_names[1]] if has_replicas else mesh
            part.copy_(
                distribute_tensor(full, shards, target.placements[-1:], src_data_rank=0).to_local()
            )
        if has_replicas:
            dist.broadcast(part, group=mesh.get_group(0), group_src=0)
    assert not missing, f"no weights for {sorted(missing)}"


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _store(
    layer: Fp8Linear,
    weight: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_shared: bool,
) -> None:
    """Quantize the weight that the first rank reads; the other ranks, whose weight is on meta,
    receive the result.
    """
    if weight.is_meta:
        layer.store(torch.zeros_like(weight, device=device, dtype=dtype))
    else:
        layer.store(weight.to(device, dtype))
    if is_shared:
        # gloo cannot send fp8
        for part in (layer.weight.qdata.view(torch.uint8), layer.weight.scale):
            dist.broadcast(part, src=0)
