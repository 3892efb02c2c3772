"""Collectives for rewards, metrics, gradients and small objects, and how ranks agree on values and
errors.

With one process they communicate nothing.
"""

import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.sharded_tensors import full_tensor, local_shard

T = TypeVar("T")


def gather_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """Return the tensors of all ranks, in rank order. Shape: (...) to (ranks, ...)."""
    if mesh.world_size == 1:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(mesh.world_size)]
    dist.all_gather(parts, values.contiguous())
    return torch.stack(parts)


def gather_replicas(values: Tensor, mesh: Mesh) -> Tensor:
    """Return the tensors of all replicas, each from its first rank.

    Shape: (...) to (replicas, ...).
    """
    return gather_ranks(values, mesh)[:: mesh.sp_size]


def sum_over_replicas(values: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over the replicas, equal on all ranks."""
    return gather_replicas(values, mesh).sum(0)


def merge_rows(
    local: Mapping[int, Sequence[float]], num_rows: int, width: int, mesh: Mesh
) -> Tensor:
    """Return a table of all ranks' rows, the lowest rank's if several have one, else NaN.

    Shape: (num_rows, width).
    """
    table = torch.full((num_rows, width), math.nan, dtype=torch.float64)
    for rows in reversed(all_objects(dict(local), mesh)):
        for row, values in rows.items():
            table[row] = torch.tensor(values, dtype=torch.float64)
    return table


def average_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh, *, is_sharded: bool) -> None:
    """Average unsharded gradients over the ranks in place.

    A missing gradient is set to zero, also if sharded.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            # so that the optimizer behaves equally in every layout
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if mesh.world_size == 1 or is_sharded:
        return
    # gradients may have different strides and dtypes
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= mesh.world_size
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Clip the gradients to a global norm of ``max_norm`` over all shards and return the norm
    before clipping.
    """
    norm = full_tensor(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
    # a product of DTensors takes a second at first
    shards = [local_shard(parameter.grad) for parameter in parameters]
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()


def all_objects(value: T, mesh: Mesh, group: "dist.ProcessGroup | None" = None) -> list[T]:
    """Return the values of all ranks, in rank order. For small objects."""
    if mesh.world_size == 1:
        return [value]
    gathered: list = [None] * mesh.world_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def first_reason(
    reason: str | None, mesh: Mesh, group: "dist.ProcessGroup | None" = None
) -> str | None:
    """Return the reason of the first rank that has one, equal on all ranks; None if none has."""
    return next(filter(None, all_objects(reason, mesh, group)), None)


@contextmanager
def raise_on_all_ranks(
    mesh: Mesh,
    group: "dist.ProcessGroup | None" = None,
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> Iterator[None]:
    """Raise an error on all ranks if the body raises one of ``errors`` on any rank, so that no rank
    waits: that of the first rank, as the class in ``errors`` that it belongs to.
    """
    problem = None
    try:
        yield
    except errors as error:
        kind = next(each for each in errors if isinstance(error, each))
        problem = kind, str(error)
    for found in all_objects(problem, mesh, group):
        if found:
            raise found[0](found[1])


def agree(name: str, value: object, mesh: Mesh) -> None:
    """Raise ValueError on all ranks unless all of them have the same value; the message says which
    ranks have which.

    The entries of a mapping are compared one by one and called ``name key``. Values are compared by
    their text. Collective.
    """
    entries = value if isinstance(value, Mapping) else {"": value}
    texts = {f"{name} {key}".rstrip(): str(entry) for key, entry in entries.items()}
    by_rank = all_objects((socket.gethostname(), texts), mesh)
    hosts = [host for host, _ in by_rank]
    problems = []
    for each in dict.fromkeys(each for _, found in by_rank for each in found):
        ranks_by_text = defaultdict(list)
        for rank, (_, found) in enumerate(by_rank):
            ranks_by_text[found.get(each, "nothing")].append(rank)
        if len(ranks_by_text) > 1:
            parts = []
            for text, ranks in ranks_by_text.items():
                where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
                parts.append(f"{text} on ranks {', '.join(map(str, ranks))} ({where})")
            problems.append(f"{each} must be the same on all ranks, got {'; '.join(parts)}")
    if problems:
        raise ValueError("\n".join(problems))


def from_main(value: T, mesh: Mesh) -> T:
    """Return the main rank's value. For small objects."""
    return all_objects(value, mesh)[0]


def any_rank(condition: bool, mesh: Mesh) -> bool:
    return bool(gather_ranks(torch.tensor(condition), mesh).any())


def barrier(mesh: Mesh) -> None:
    """Wait for all ranks."""
    if mesh.world_size > 1:
        dist.barrier()
