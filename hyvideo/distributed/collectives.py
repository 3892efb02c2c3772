"""Messages between ranks: a few rewards, sums of metrics, gradients. With one process each is the identity."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import whole

T = TypeVar("T")


def gather_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """A tensor of every rank, in their order. Shape: (...) to (ranks, ...)."""
    if mesh.world_size == 1:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(mesh.world_size)]
    dist.all_gather(parts, values.contiguous())
    return torch.stack(parts)


def gather_replicas(values: Tensor, mesh: Mesh) -> Tensor:
    """A tensor of every data-parallel replica, from its first rank. Shape: (...) to (replicas, ...)."""
    return gather_ranks(values, mesh)[:: mesh.sp_size]


def sum_over_replicas(values: Tensor, mesh: Mesh) -> Tensor:
    """Sum over the data-parallel replicas, equal on all ranks."""
    return gather_replicas(values, mesh).sum(0)


def merge_rows(local: Mapping[int, Sequence[float]], num_rows: int, width: int, mesh: Mesh) -> Tensor:
    """Rows of all ranks, the first rank's where several hold one, else NaN. Shape: (num_rows, width), float64."""
    table = torch.full((num_rows, width), math.nan, dtype=torch.float64)
    for rows in reversed(all_objects(dict(local), mesh)):
        for row, values in rows.items():
            table[row] = torch.tensor(values, dtype=torch.float64)
    return table


def average_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh, *, is_sharded: bool) -> None:
    """Mean of the gradients over the ranks, in place, unless they are sharded; a missing gradient is zero."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # the optimizer then does the same on any number of ranks
        gradients.append(parameter.grad)
    if mesh.world_size == 1 or is_sharded:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])  # whatever their strides and dtypes are
    dist.all_reduce(flat)
    flat /= mesh.world_size
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> float:
    """Scales the gradients to a global norm of at most ``largest``; gives their norm before, over all shards."""
    return whole(nn.utils.clip_grad_norm_(parameters, largest)).item()


def all_objects(value: T, mesh: Mesh, group: "dist.ProcessGroup | None" = None) -> list[T]:
    """Values of every rank, in their order, on every rank: small objects."""
    if mesh.world_size == 1:
        return [value]
    gathered: list = [None] * mesh.world_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def share_reason(reason: str | None, mesh: Mesh, group: "dist.ProcessGroup | None" = None) -> str | None:
    """The reason of the first rank that has one, on every rank, so that all stop alike; None if none has."""
    return next(filter(None, all_objects(reason, mesh, group)), None)


@contextmanager
def failing_together(
    mesh: Mesh, group: "dist.ProcessGroup | None" = None, errors: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Context for all ranks where any of ``errors`` on one is the first of them on all: none waits for the others."""
    problem = None
    try:
        yield
    except errors as error:
        problem = str(error)
    if shared := share_reason(problem, mesh, group):
        raise errors[0](shared)


def from_main(value: T, mesh: Mesh) -> T:
    """The main rank's value, on every rank: a small object, as the ground of a decision that all take alike."""
    return all_objects(value, mesh)[0]


def anywhere(claim: bool, mesh: Mesh) -> bool:
    """Claims that it is so on some rank."""
    return bool(gather_ranks(torch.tensor(claim), mesh).any())


def barrier(mesh: Mesh) -> None:
    """Waits until every rank is here."""
    if mesh.world_size > 1:
        dist.barrier()
