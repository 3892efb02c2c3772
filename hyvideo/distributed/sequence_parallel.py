"""Ulysses sequence parallelism (arXiv:2309.14509): image tokens, and attention heads, split over
the ranks.

Between blocks, a rank holds its part of the image tokens and all text tokens. In attention, one
all-to-all exchanges query, key and value from (some tokens, all heads) to (all tokens, some heads).
A second all-to-all reverses this for the result, and an all-gather over the heads collects the
text. Image tokens are padded to divide evenly; the padding is removed before attention, so no mask
is needed. If the heads do not divide evenly, the first ranks have one more.

Gradients: the backward pass of every collective is the exact adjoint of its forward pass, and all
ranks of a group compute the same loss L on the joined output. The ranks' gradients therefore sum to
``sp_size * dL``, and the mean over the ranks, which FSDP and data parallelism compute, is the
gradient of every parameter.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from hyvideo.models.attention import (
    Layout,
    QueryKeyValue,
    WholeSequence,
    attend,
    joint_lengths,
    rotated,
)


class SplitSequence(WholeSequence):
    """Sequence whose image tokens are split over the ranks of a group, in rank order, with padding
    at the end.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def attend(
        self, image: QueryKeyValue, text: QueryKeyValue | None, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Return the attended image tokens of this rank and all text tokens, as
        `WholeSequence.attend` does.
        """
        query, key, value = image
        del image
        heads = head_shares(value.shape[2], self.size)
        # One all-to-all for query, key and value; the padding is removed here.
        local = torch.cat((rotated(query, layout), rotated(key, layout), value))
        joint = _to_heads(local, heads, self.rank, self.group)[:, : layout.num_image_tokens].chunk(
            3
        )
        if text:
            first, count = sum(heads[: self.rank]), heads[self.rank]
            joint = [
                torch.cat(pair, dim=1)
                for pair in zip(joint, (part.narrow(2, first, count) for part in text))
            ]
        attended = attend(QueryKeyValue(*joint), joint_lengths(layout))
        image_out, text_out = attended.tensor_split((layout.num_image_tokens,), dim=1)
        image_out = _to_tokens(
            _pad(image_out, 1, -layout.num_image_tokens % self.size), heads, self.group
        )
        return image_out, _gather_heads(text_out, heads, self.group) if text else text_out

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        padded = _pad(tokens, dim, -tokens.shape[dim] % self.size)
        return padded.chunk(self.size, dim)[self.rank].contiguous()

    def join(self, tokens: Tensor, num_tokens: int) -> Tensor:
        return _Join.apply(tokens, self.group)[:, :num_tokens]


def head_shares(num_heads: int, sp_size: int) -> list[int]:
    """Return the number of attention heads of each rank; the first ranks have one more if they do
    not divide evenly.
    """
    share, num_larger = divmod(num_heads, sp_size)
    return [share + 1] * num_larger + [share] * (sp_size - num_larger)


def _to_heads(tensor: Tensor, heads: list[int], rank: int, group: dist.ProcessGroup) -> Tensor:
    """Exchange local tokens of all heads for all tokens of local heads.

    Shape: (batch, tokens, heads, head dim).
    """
    parts = tensor.split(heads, dim=2)
    batch, tokens, _, dim = tensor.shape
    received = batch * tokens * heads[rank] * dim
    flat = _exchange(parts, [received] * len(heads), group)
    return torch.cat(flat.view(len(heads), batch, tokens, heads[rank], dim).unbind(0), dim=1)


def _to_tokens(tensor: Tensor, heads: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange all tokens of local heads for local tokens of all heads.

    Shape: (batch, tokens, heads, head dim).
    """
    parts = tensor.chunk(len(heads), dim=1)
    batch, tokens, _, dim = parts[0].shape
    sizes = [batch * tokens * count * dim for count in heads]
    flat = _exchange(parts, sizes, group).split(sizes)
    return torch.cat(
        [part.view(batch, tokens, count, dim) for part, count in zip(flat, heads)], dim=2
    )


def _exchange(parts: Sequence[Tensor], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``parts[r]`` to rank r and return, flattened, the ``received[r]`` elements from each
    rank r.
    """
    sent = torch.cat([part.flatten() for part in parts])
    return collectives.wait_tensor(
        collectives.all_to_all_single_autograd(
            sent, received, [part.numel() for part in parts], group
        )
    )


def _gather_heads(text: Tensor, heads: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the text with all heads.

    Backward is a reduce-scatter: each rank has part of the text's gradient.
    """
    largest = max(heads)
    padded = _pad(text, 2, largest - text.shape[2]).contiguous()
    gathered = collectives.wait_tensor(collectives.all_gather_single_autograd(padded, 2, group))
    if min(heads) == largest:
        return gathered
    return torch.cat(
        [part[:, :, :count] for part, count in zip(gathered.split(largest, dim=2), heads)], dim=2
    )


class _Join(torch.autograd.Function):
    """All-gather of the image tokens. Shape: (batch, local tokens, dim) to (batch, tokens, dim).

    All ranks have the same loss and gradient, so their sum is ``size`` times the local one, without
    communication.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.rank = dist.get_world_size(group), dist.get_rank(group)
        return collectives.wait_tensor(
            collectives.all_gather_single_autograd(tokens.contiguous(), 1, group)
        )

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.size, dim=1)[ctx.rank] * ctx.size, None


def _pad(tokens: Tensor, dim: int, count: int) -> Tensor:
    """Return the tensor padded with ``count`` zeros along ``dim``."""
    if not count:
        return tokens
    return F.pad(tokens, (0, 0) * (tokens.ndim - 1 - dim) + (0, count))
