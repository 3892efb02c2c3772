"""Attention over trimmed text, without a mask.

diffusers' processor expands the text mask to all pairs of tokens in every layer: at 480x848 and 81
frames that is a gigabyte per sample, and it rules out the fast attention kernels. The mask is not
needed. Text is cut to its valid tokens, which is exact because a masked token does not affect any
other token. If the texts of a batch differ in length, attention runs separately on each group of
consecutive samples of equal length, and padded outputs are 0.

The lengths are Python integers, so reading them needs no GPU synchronization. They are passed to
every block together with the rotary tables, so that activation checkpointing recomputes a block
with the same lengths.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from hyvideo.models.attention_kernels import scaled_dot_product

Size = tuple[int, int, int]  # frames, height, width


class Layout(NamedTuple):
    """Lengths and rotary tables of the tokens of a batch, passed to every block in place of
    diffusers' tables.
    """

    cos: Tensor  # (local image tokens, head dim)
    sin: Tensor  # (local image tokens, head dim), negative for the first element of each pair
    text_lengths: tuple[int, ...]  # valid text tokens of each sample; padding follows them
    num_image_tokens: int  # total over all ranks, without padding


class QueryKeyValue(NamedTuple):
    """Query, key and value. Shape of each: (batch, tokens, heads, head dim)."""

    query: Tensor
    key: Tensor
    value: Tensor


class WholeSequence:
    """Attention on a single rank.

    ``distributed.sequence_parallel`` has the version that splits the image tokens.
    """

    def attend(
        self, image: QueryKeyValue, text: QueryKeyValue | None, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Apply rotary embeddings to the image tokens and return the attention outputs of image and
        text.

        Text is padded on the right. If ``text`` is None, as in pure self-attention, the text output
        is empty. Shape of each: (batch, tokens, heads, head dim).
        """
        query, key, value = image
        # each tensor is then freed as soon as it is copied, unless the caller holds a reference
        del image
        query = rotated(query, layout, text and text.query)
        key = rotated(key, layout, text and text.key)
        if text:
            value = torch.cat((value, text.value), dim=1)
        del text
        attended = attend(QueryKeyValue(query, key, value), joint_lengths(layout))
        num_image_tokens = layout.num_image_tokens
        return attended.split((num_image_tokens, attended.shape[1] - num_image_tokens), dim=1)

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor that has one entry per image token along ``dim``."""
        return tokens

    def join(self, tokens: Tensor, num_tokens: int) -> Tensor:
        """Return the image tokens of all ranks.

        Shape: (batch, local tokens, dim) to (batch, num_tokens, dim).
        """
        return tokens


def unpatchify(tokens: Tensor, grid: Size, patch: Size, order: str) -> Tensor:
    """Return tokens as a video; ``order`` is the order of the values within a patch, such as "c pf
    ph pw".

    The result is never a view, because FSDP2 warns about views: an in-place change of one drops its
    backward hook. Shape: (batch, tokens, patch) to (batch, channels, frames, height, width).
    """
    sizes = dict(zip(("f", "h", "w", "pf", "ph", "pw"), (*grid, *patch)))
    video = rearrange(tokens, f"b (f h w) ({order}) -> b c (f pf) (h ph) (w pw)", **sizes)
    # with patches of one pixel, rearrange returns a view
    return video.clone() if video._is_view() else video


def rotated(image: Tensor, layout: Layout, text: Tensor | None = None) -> Tensor:
    """Return image tokens with rotary embeddings, followed by text tokens.

    The tables get no gradient. Shape: (batch, tokens, heads, head dim).
    """
    assert not (layout.cos.requires_grad or layout.sin.requires_grad), (
        "rotary tables get no gradient here: rotate by learned tables before the call, with torch's "
        "own operations, and pass tables of ones and zeros"
    )
    if text is None:
        text = image.new_empty(len(image), 0, *image.shape[2:])
    return _Rotated.apply(image, text, layout.cos, layout.sin)


def joint_lengths(layout: Layout) -> list[int]:
    """Return the number of valid image and text tokens of each sample."""
    return [layout.num_image_tokens + length for length in layout.text_lengths]


class _Rotated(torch.autograd.Function):
    """Image tokens with rotary embeddings, followed by text tokens.

    Shape: (batch, tokens, heads, head dim).

    The backward pass rotates by the opposite angle, so only the tables are saved for it.
    """

    @staticmethod
    def forward(ctx, image: Tensor, text: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        # Tokens are the outermost dimension: the image tokens are then contiguous, as compilers
        # require of `out`.
        joint = image.new_empty(len(cos) + text.shape[1], len(image), *image.shape[2:])
        _rotate(image.transpose(0, 1), cos, sin, 1, out=joint[: len(cos)])
        joint[len(cos) :] = text.transpose(0, 1)
        return joint.transpose(0, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        image, text = gradient.transpose(0, 1).tensor_split((len(cos),))
        rotated = _rotate(image, cos, sin, -1, out=image.new_empty(image.shape))
        return rotated.transpose(0, 1), text.transpose(0, 1), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, sign: int, *, out: Tensor) -> Tensor:
    """Multiply pairs of values, as complex numbers, by ``cos + sign i sin``.

    Shape: (tokens, batch, heads, dim).
    """
    swapped = heads.unflatten(3, (-1, 2)).flip(4).flatten(3)
    return torch.addcmul(
        heads * cos[:, None, None], swapped, sin[:, None, None], value=sign, out=out
    )


def attend(joint: QueryKeyValue, lengths: Sequence[int]) -> Tensor:
    """Return attention over the first ``lengths[i]`` tokens of sample i, 0 for padding: (batch,
    tokens, heads, dim).
    """
    by_head = QueryKeyValue(*(tensor.transpose(1, 2) for tensor in joint))
    if min(lengths) == by_head.query.shape[2]:
        return scaled_dot_product(*by_head).transpose(1, 2)
    return _attend_in_runs(by_head, lengths).transpose(1, 2)


def leave_out_of_graphs() -> None:
    """Leave attention for samples of unequal length out of blocks that are compiled later: every
    combination of lengths would be a separate graph.

    A decorator would import torch's compiler, 1.5 s of CPU time, in programs that compile nothing.
    """
    global _attend_in_runs
    _attend_in_runs = torch.compiler.disable(_attend_in_runs)


def _attend_in_runs(by_head: QueryKeyValue, lengths: Sequence[int]) -> Tensor:
    """Return attention for samples of unequal length. Shape: (batch, heads, tokens, head dim)."""
    parts = []
    for rows, length in equal_runs(lengths):
        valid = (tensor[rows, :, :length] for tensor in by_head)
        padding = (0, 0, 0, by_head.query.shape[2] - length)
        parts.append(F.pad(scaled_dot_product(*valid), padding))
    return torch.cat(parts)


def equal_runs(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Return the rows and the length of each run of consecutive samples of equal length."""
    runs = []
    start = 0
    for length, same in itertools.groupby(lengths):
        end = start + len(list(same))
        runs.append((slice(start, end), length))
        start = end
    return runs
