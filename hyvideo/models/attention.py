"""Attention over trimmed text, without a mask.

diffusers' processor spreads the text mask over all pairs of tokens, in every layer: at 480x848 and 81 frames
that is a gigabyte per sample, and it keeps the fast attention kernels away. The mask is not needed. Text is cut
to its valid tokens, which is exact: a masked token changes no other. Where the samples of a batch have texts of
different length, attention goes over each run of equal length by itself, and what is left of the padding is 0.

The lengths are Python numbers and travel with the rotary tables as an argument of every block, so a recomputed
block knows them too and no GPU is asked for them. The VAE's attention has a cure of its own: `vae.install_layers`.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class TrimmedTextAttnProcessor:
    """Joint attention of image and text tokens, in place of diffusers' HunyuanVideo15AttnProcessor2_0."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
        image_rotary_emb: Layout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attended image tokens and text tokens, under diffusers' names of arguments; text is padded on the right.

        Shape of each: (batch, tokens, dim).
        """
        cos, sin, text_lengths, num_image_tokens = image_rotary_emb
        joint = project_image(attn, hidden_states, (cos, sin), project_text(attn, encoder_hidden_states))
        attended = attend(joint, [num_image_tokens + length for length in text_lengths])
        image, text = attended.split((num_image_tokens, attended.shape[1] - num_image_tokens), dim=1)
        return project_out(attn, image, text)


def project_image(
    attn: nn.Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], text: QueryKeyValue | None = None
) -> QueryKeyValue:
    """Query, key and value of image tokens, normalised per head and rotated to their position; ``text`` follows."""
    query, key, value = (
        linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v)
    )
    query, key = _normalised(attn.norm_q, query), _normalised(attn.norm_k, key)
    none = value.new_empty(len(value), 0, *value.shape[2:])
    behind = text or QueryKeyValue(none, none, none)
    query, key = (_Rotated.apply(*pair, *rotary) for pair in ((query, behind.query), (key, behind.key)))
    return QueryKeyValue(query, key, torch.cat((value, text.value), dim=1) if text else value)


def project_text(attn: nn.Module, encoder_hidden_states: Tensor) -> QueryKeyValue:
    """Query, key and value of text tokens, normalised per head; text has no position in the video."""
    query, key, value = (
        linear(encoder_hidden_states).unflatten(2, (attn.heads, -1))
        for linear in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    )
    return QueryKeyValue(_normalised(attn.norm_added_q, query), _normalised(attn.norm_added_k, key), value)


def _normalised(norm: nn.Module, heads: Tensor) -> Tensor:
    """Root mean square norm of every head by one kernel, which is float32 within."""
    with torch.autocast(heads.device.type, enabled=False):
        return F.rms_norm(heads, norm.dim, norm.weight.to(heads.dtype), norm.eps)


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
    """Attention among the first ``lengths[i]`` tokens of each sample; the others give 0.

    Shape: (batch, tokens, heads, head dim).
    """
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


def project_out(attn: nn.Module, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Output projections. Shape of each: (batch, tokens, heads, head dim) to (batch, tokens, dim)."""
    linear, dropout = attn.to_out
    return dropout(linear(image.flatten(2))), attn.to_add_out(text.flatten(2))


def dead_modules(transformer: nn.Module) -> tuple[str, ...]:
    """Names of the layers that never get a gradient: they only make the text's last output, which nothing reads."""
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
    return f"{last}.attn.to_add_out", f"{last}.ff_context"


def freeze_dead_parameters(transformer: nn.Module) -> list[str]:
    """Freezes what never gets a gradient, so that no optimizer or reduction waits for one; gives the names."""
    dead = []
    for name in dead_modules(transformer):
        module = transformer.get_submodule(name).requires_grad_(False)
        dead += [parameter for parameter, _ in module.named_parameters(prefix=name)]
    return dead
