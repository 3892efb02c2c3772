"""Forward pass of a block of Wan's transformer, with diffusers' layers; a norm with its modulation
is one kernel.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hyvideo.models.attention import Layout, QueryKeyValue
from hyvideo.models.attention_kernels import scaled_dot_product
from hyvideo.models.norms import layer_norm, modulated_norm, rms_norm
from hyvideo.models.wan.settings import TEXT_SLOTS


class Context(NamedTuple):
    """What the tokens of a video attend to, embedded."""

    text: Tensor  # (batch, rows, dim); all rows from the last one to the 512th are equal
    pictures: Tensor | None  # one or two: (batch, pictures x 257, dim), for Wan2.1 image-to-video


class TwoTimes(NamedTuple):
    """Times of a block whose first ``num_clean`` local tokens, which are a given first frame, have
    another timestep than the others. Shape of each: (batch, 6, dim).
    """

    clean: Tensor
    noisy: Tensor
    num_clean: int


class _Modulation(NamedTuple):
    """Shift, scale and gate of self-attention, then of the feed-forward network, for each part of
    the tokens; ``ends`` are the ends of all parts but the last.
    """

    parts: list[tuple[Tensor, ...]]
    ends: tuple[int, ...]

    def norm(self, tokens: Tensor, first: int, eps: float) -> Tensor:
        """Return the tokens normalized, with the shift and scale from the index ``first``."""
        return self._joined(
            modulated_norm(part, *values[first : first + 2], eps=eps)
            for part, values in zip(self._split(tokens), self.parts)
        )

    def add(self, tokens: Tensor, change: Tensor, gate: int) -> Tensor:
        """Return the tokens plus the change times the gate."""
        return self._joined(
            torch.addcmul(part, changed, values[gate])
            for part, changed, values in zip(self._split(tokens), self._split(change), self.parts)
        )

    def _split(self, tokens: Tensor) -> Sequence[Tensor]:
        return tokens.tensor_split(self.ends, dim=1) if self.ends else [tokens]

    def _joined(self, parts: Iterable[Tensor]) -> Tensor:
        parts = list(parts)
        return torch.cat(parts, dim=1) if self.ends else parts[0]


def forward(
    self: nn.Module, tokens: Tensor, context: Context, time: Tensor | TwoTimes, layout: Layout
) -> Tensor:
    """Return the tokens after the block. Shape: (batch, tokens, dim).

    Args:
        time: Shift, scale and gate of self-attention, then of the feed-forward network, to which
            the block's table is added. Shape: (batch, 6, dim).
    """
    times: tuple[Tensor, ...]
    ends: tuple[int, ...]
    if isinstance(time, TwoTimes):
        times = (time.clean, time.noisy)
        ends = (time.num_clean,)
    else:
        times = (time,)
        ends = ()
    modulation = _Modulation(
        [(self.scale_shift_table + each).to(tokens.dtype).chunk(6, dim=1) for each in times],
        ends=ends,
    )
    attended = _self_attention(self, modulation.norm(tokens, 0, self.norm1.eps), layout)
    tokens = modulation.add(tokens, attended, 2)
    del attended  # lowers the peak, which is in the feed-forward network
    tokens = tokens + _cross_attention(self.attn2, layer_norm(self.norm2, tokens), context)
    hidden = self.ffn(modulation.norm(tokens, 3, self.norm3.eps))
    return modulation.add(tokens, hidden, 5)


def _self_attention(block: nn.Module, tokens: Tensor, layout: Layout) -> Tensor:
    """Return self-attention among the video's tokens on all ranks. Shape: (batch, tokens, dim)."""
    attended, _ = block.sequence.attend(_projected(block.attn1, tokens, tokens), None, layout)
    return block.attn1.to_out[0](attended.flatten(2))


def _cross_attention(attention: nn.Module, tokens: Tensor, context: Context) -> Tensor:
    """Return cross-attention of this rank's tokens to the text, including its padding, plus that of
    the same queries to the pictures.

    Shape: (batch, tokens, dim).
    """
    query, key, value = _projected(attention, tokens, context.text)
    query, key, value = (
        part.transpose(1, 2) for part in (query, _with_padding(key), _with_padding(value))
    )
    attended = scaled_dot_product(query, key, value)
    if context.pictures is not None:
        key, value = (
            part.unflatten(2, (attention.heads, -1)).transpose(1, 2)
            for part in (
                rms_norm(attention.norm_added_k, attention.add_k_proj(context.pictures)),
                attention.add_v_proj(context.pictures),
            )
        )
        attended = attended + scaled_dot_product(query, key, value)
    return attention.to_out[0](attended.transpose(1, 2).flatten(2))


def _with_padding(rows: Tensor) -> Tensor:
    """Return the keys or values of 512 tokens of text, of which the given last one is repeated.

    Shape: (batch, rows, heads, head dim) to (batch, 512, heads, head dim).
    """
    padding = rows[:, -1:].expand(-1, TEXT_SLOTS - rows.shape[1], -1, -1)
    return torch.cat((rows, padding), dim=1)


def _projected(attention: nn.Module, tokens: Tensor, context: Tensor) -> QueryKeyValue:
    """Return query, key and value; query and key are normalized over all heads together."""
    query = rms_norm(attention.norm_q, attention.to_q(tokens))
    key = rms_norm(attention.norm_k, attention.to_k(context))
    return QueryKeyValue(
        *(
            part.unflatten(2, (attention.heads, -1))
            for part in (query, key, attention.to_v(context))
        )
    )
