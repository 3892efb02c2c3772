"""Tables of rotary position embeddings over frames, rows and columns.

diffusers has them in the module of each transformer. The import of one such module loads all of its
models, peft and torch's compiler, which takes seconds, also where no model is built.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def rotary_tables(
    grid: Sequence[int],
    dims: Sequence[int],
    theta: float,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of all token positions for `attention.Layout`. Shape of each: (tokens, sum
    of ``dims``).

    ``grid`` has the tokens of each axis and ``dims`` its part of a head. Along an axis, pair k of
    the part turns by position / theta^(2k / dim), computed in ``dtype``. The sine of the first
    value of a pair is negative, because it becomes x cos - y sin.
    """
    cos, sin = [], []
    for axis, (size, dim) in enumerate(zip(grid, dims)):
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)
        positions = torch.arange(size, dtype=dtype, device=device)
        angles = torch.outer(positions, frequencies).repeat_interleave(2, dim=1)
        shape = [1, 1, 1, dim]
        shape[axis] = size
        cos.append(angles.cos().float().view(shape).expand(*grid, dim))
        sin.append(angles.sin().float().view(shape).expand(*grid, dim))
    tables = [torch.cat(parts, dim=-1).flatten(0, 2) for parts in (cos, sin)]
    tables[1][:, ::2].neg_()
    return tables[0], tables[1]
