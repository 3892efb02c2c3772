"""Attention over trimmed text, without a mask.

diffusers' processor spreads the text mask over all pairs of tokens, in every layer: at 480x848 and 81 frames
that is a gigabyte per sample, and it keeps the fast attention kernels away. The mask is not needed. Text is cut
to its valid tokens, which is exact: a masked token changes no other. Where the samples of a batch have texts of
different length, attention goes over each run of equal length by itself, and what is left of the padding is 0.

The lengths are Python numbers and travel with the rotary tables as an argument of every block, so a recomputed
block knows them too and no GPU is asked for them.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

Size = tuple[int, int, int]  # frames, height, width


class Layout(NamedTuple):
    """Lengths and positions of the tokens of a batch, given to every block in place of the rotary tables."""

    cos: Tensor  # (local image tokens, head dim)
    sin: Tensor  # (local image tokens, head dim), negative for the first of a pair
    text_lengths: tuple[int, ...]  # valid text tokens of each sample; they come first
    num_image_tokens: int  # of all processes together, without padding


class QueryKeyValue(NamedTuple):
    """Shape of each: (batch, tokens, heads, head dim)."""

    query: Tensor
    key: Tensor
    value: Tensor


class WholeSequence:
    """The image tokens of this process: all of them. ``distributed.sequence_parallel`` has the other answer."""

    def attend(self, image: QueryKeyValue, text: QueryKeyValue | None, layout: Layout) -> tuple[Tensor, Tensor]:
        """Rotate the image's query and key to their positions and return attended image tokens and text tokens.

        Text is padded on the right; a model without text in this attention gives None and gets no tokens back.
        Shape of each: (batch, tokens, heads, head dim).
        """
        query, key, value = image
        del image  # a caller that keeps no reference has each tensor freed as soon as its copy exists
        query = rotated(query, layout, text and text.query)
        key = rotated(key, layout, text and text.key)
        value = torch.cat((value, text.value), dim=1) if text else value
        del text
        attended = attend(QueryKeyValue(query, key, value), joint_lengths(layout))
        num_image_tokens = layout.num_image_tokens
        return attended.split((num_image_tokens, attended.shape[1] - num_image_tokens), dim=1)

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor that has an entry along ``dim`` for each image token."""
        return tokens

    def join(self, tokens: Tensor, num_tokens: int) -> Tensor:
        """Return the image tokens of all processes. Shape: (batch, local tokens, dim) to (batch, num_tokens, dim)."""
        return tokens


def video_of(tokens: Tensor, grid: Size, patch: Size, order: str) -> Tensor:
    """Return tokens as a video, whose patches are in this order (such as "c pf ph pw"), in memory of its own.

    A view would lose FSDP2's backward hook where somebody changes the output in place, so FSDP2 warns of one.
    Shape: (batch, tokens, patch) to (batch, channels, frames, height, width).
    """
    sizes = dict(zip(("f", "h", "w", "pf", "ph", "pw"), (*grid, *patch)))
    video = rearrange(tokens, f"b (f h w) ({order}) -> b c (f pf) (h ph) (w pw)", **sizes)
    return video.clone() if video._is_view() else video  # patches of one pixel are moved without a copy


def rotated(image: Tensor, layout: Layout, text: Tensor | None = None) -> Tensor:
    """Return the image's tokens rotated to their positions, then the text's. (batch, tokens, heads, head dim)"""
    behind = image.new_empty(len(image), 0, *image.shape[2:]) if text is None else text
    return _Rotated.apply(image, behind, layout.cos, layout.sin)


def joint_lengths(layout: Layout) -> list[int]:
    """Return the number of valid tokens of each sample, of image and text together."""
    return [layout.num_image_tokens + length for length in layout.text_lengths]


class _Rotated(torch.autograd.Function):
    """Image tokens rotated to their position, and text tokens behind them. Shape: (batch, tokens, heads, head dim).

    Backward: the rotation by the opposite angle. Nothing but the tables is kept for it.
    """

    @staticmethod
    def forward(ctx, image: Tensor, text: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        # Tokens outermost: the image's are then contiguous, which compilers demand of what is written to.
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
    """Pairs as complex numbers times ``cos + sign i sin``, in float32 within. Shape: (tokens, batch, heads, dim)."""
    swapped = heads.unflatten(3, (-1, 2)).flip(4).flatten(3)
    return torch.addcmul(heads * cos[:, None, None], swapped, sin[:, None, None], value=sign, out=out)


def attend(joint: QueryKeyValue, lengths: Sequence[int]) -> Tensor:
    """Attention among the first ``lengths[i]`` tokens of each sample, else 0. (batch, tokens, heads, head dim)"""
    by_head = QueryKeyValue(*(tensor.transpose(1, 2) for tensor in joint))
    if min(lengths) == by_head.query.shape[2]:
        return F.scaled_dot_product_attention(*by_head).transpose(1, 2)
    return _attend_in_runs(by_head, lengths).transpose(1, 2)


# Every pattern of lengths would be a graph of its own.
@torch.compiler.disable
def _attend_in_runs(by_head: QueryKeyValue, lengths: Sequence[int]) -> Tensor:
    """Attention of samples of unequal length. Shape: (batch, heads, tokens, head dim)."""
    parts = []
    for rows, length in equal_runs(lengths):
        valid = (tensor[rows, :, :length] for tensor in by_head)
        padding = (0, 0, 0, by_head.query.shape[2] - length)
        parts.append(F.pad(F.scaled_dot_product_attention(*valid), padding))
    return torch.cat(parts)


def equal_runs(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Runs of neighbouring samples of equal length: the rows of the batch and the length."""
    runs, start = [], 0
    for length, same in itertools.groupby(lengths):
        end = start + len(list(same))
        runs.append((slice(start, end), length))
        start = end
    return runs
