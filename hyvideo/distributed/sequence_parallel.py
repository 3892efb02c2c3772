"""Ulysses sequence parallelism: ranks share the image tokens of a video, and inside attention its heads.

Between the blocks a rank has its part of the image tokens and all text tokens. In attention, one all-to-all turns
query, key and value of some tokens and all heads into all tokens and some heads. Another brings the result back, and
an all-gather over the heads puts the text together. Tokens are padded where they do not divide, and the padding ends
before attention, so no mask is needed; heads that do not divide give some ranks one more.

Gradients: every collective's backward pass is the exact adjoint of its forward pass, and all ranks of a group compute
the same loss L on the joined output. What a rank holds after its backward pass therefore adds up to ``sp_size * dL``:
the mean over the ranks, FSDP's and data parallelism's own reduction, is the gradient, for every parameter.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from hyvideo.models.attention import Layout, QueryKeyValue, WholeSequence, attend, joint_lengths, rotated


class SplitSequence(WholeSequence):
    """The image tokens, shared among the ranks of a group in their order; the last may hold padding."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def attend(self, image: QueryKeyValue, text: QueryKeyValue | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return attended image tokens of this rank, and text tokens, as `WholeSequence.attend`."""
        query, key, value = image
        del image
        heads = head_shares(value.shape[2], self.size)
        # One message for query, key and value; padding ends here.
        local = torch.cat((rotated(query, layout), rotated(key, layout), value))
        joint = _to_heads(local, heads, self.rank, self.group)[:, : layout.num_image_tokens].chunk(3)
        if text:
            first, count = sum(heads[: self.rank]), heads[self.rank]
            joint = [torch.cat(pair, dim=1) for pair in zip(joint, (part.narrow(2, first, count) for part in text))]
        attended = attend(QueryKeyValue(*joint), joint_lengths(layout))
        of_image, of_text = attended.tensor_split((layout.num_image_tokens,), dim=1)
        of_image = _to_tokens(_pad(of_image, 1, -layout.num_image_tokens % self.size), heads, self.group)
        return of_image, _gather_heads(of_text, heads, self.group) if text else of_text

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        padded = _pad(tokens, dim, -tokens.shape[dim] % self.size)
        return padded.chunk(self.size, dim)[self.rank].contiguous()

    def join(self, tokens: Tensor, num_tokens: int) -> Tensor:
        return _Join.apply(tokens, self.group)[:, :num_tokens]


def head_shares(num_heads: int, sp_size: int) -> list[int]:
    """Attention heads of each rank of a group; the first have one more where they do not divide."""
    return [num_heads // sp_size + (rank < num_heads % sp_size) for rank in range(sp_size)]


def _to_heads(tensor: Tensor, heads: list[int], rank: int, group: dist.ProcessGroup) -> Tensor:
    """Exchanges local tokens of all heads for all tokens of local heads. Shape: (batch, tokens, heads, head dim)."""
    parts = tensor.split(heads, dim=2)
    batch, tokens, _, dim = tensor.shape
    received = batch * tokens * heads[rank] * dim
    flat = _exchange(parts, [received] * len(heads), group)
    return torch.cat(flat.view(len(heads), batch, tokens, heads[rank], dim).unbind(0), dim=1)


def _to_tokens(tensor: Tensor, heads: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchanges all tokens of local heads for local tokens of all heads. Shape: (batch, tokens, heads, head dim)."""
    parts = tensor.chunk(len(heads), dim=1)
    batch, tokens, _, dim = parts[0].shape
    sizes = [batch * tokens * number * dim for number in heads]
    flat = _exchange(parts, sizes, group).split(sizes)
    return torch.cat([part.view(batch, tokens, number, dim) for part, number in zip(flat, heads)], dim=2)


def _exchange(parts: Sequence[Tensor], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ``parts[r]`` to rank r, and gives what comes, flat, ``received[r]`` numbers from rank r."""
    sent = torch.cat([part.flatten() for part in parts])
    return collectives.wait_tensor(
        collectives.all_to_all_single_autograd(sent, received, [part.numel() for part in parts], group)
    )


def _gather_heads(text: Tensor, heads: list[int], group: dist.ProcessGroup) -> Tensor:
    """Text of all heads. Backward: reduce-scatter of the sum, since each rank has a part of the text's gradient."""
    most = max(heads)
    padded = _pad(text, 2, most - text.shape[2]).contiguous()
    gathered = collectives.wait_tensor(collectives.all_gather_single_autograd(padded, 2, group))
    if min(heads) == most:
        return gathered
    return torch.cat([part[:, :, :number] for part, number in zip(gathered.split(most, dim=2), heads)], dim=2)


class _Join(torch.autograd.Function):
    """Image tokens of all ranks. Shape: (batch, local tokens, dim) to (batch, tokens, dim).

    All ranks have the same loss, so the sum of their gradients is ``size`` times each: backward needs no message.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.rank = dist.get_world_size(group), dist.get_rank(group)
        return collectives.wait_tensor(collectives.all_gather_single_autograd(tokens.contiguous(), 1, group))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.size, dim=1)[ctx.rank] * ctx.size, None


def _pad(tokens: Tensor, dim: int, count: int) -> Tensor:
    """The tensor with ``count`` more zeros along ``dim``."""
    if not count:
        return tokens
    return F.pad(tokens, (0, 0) * (tokens.ndim - 1 - dim) + (0, count))
