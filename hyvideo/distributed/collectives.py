"""What ranks tell each other: a few rewards, sums of metrics, gradients. With one process each is the identity."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyvideo.distributed.mesh import Mesh


def gather_replicas(values: Tensor, mesh: Mesh) -> Tensor:
    """A vector of every data-parallel replica, in their order. Shape: (n,) to (replicas, n).

    Ranks of one sequence-parallel group hold the same values; the first of each speaks for it.
    """
    if mesh.world_size == 1:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(mesh.world_size)]
    dist.all_gather(parts, values.contiguous())
    return torch.stack(parts[:: mesh.sp_size])


def sum_over_replicas(values: Tensor, mesh: Mesh) -> Tensor:
    """Sum over the data-parallel replicas, equal on all ranks."""
    return gather_replicas(values, mesh).sum(0)


def average_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Mean of the gradients over the ranks, in place, as one message.

    What got none in this update, on this rank or on all, has a gradient of zero: the optimizer then does the same on
    any number of ranks.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if mesh.world_size == 1:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= mesh.world_size
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def gather_objects(own: object, mesh: Mesh) -> list:
    """What every replica has, in their order, on the main rank; an empty list elsewhere. For records only."""
    if mesh.world_size == 1:
        return [own]
    everyone = [None] * mesh.world_size if mesh.is_main else None
    dist.gather_object(own, everyone, dst=0)
    return everyone[:: mesh.sp_size] if everyone else []


def barrier(mesh: Mesh) -> None:
    """Waits until every rank is here."""
    if mesh.world_size > 1:
        dist.barrier()
