"""What a rank holds of a parameter, whether it is sharded or whole."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank. Every rank must ask."""
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


def norm_of(total: Tensor) -> float:
    """A norm that ``clip_grad_norm_`` gave, over all ranks."""
    return whole(total).item()


def is_sharded(parameters: Mapping[str, Tensor]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters.values())


def same(a: Tensor, b: Tensor) -> bool:
    """Claims that this rank's parts are equal bit for bit."""
    return torch.equal(local(a), local(b))
