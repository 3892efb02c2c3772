"""Forward pass of Mochi's transformer: diffusers' layers and blocks, with attention that supports
sequence parallelism and needs no mask.

Mochi predicts ``data - noise`` at the time ``1 - sigma``; here, as everywhere in this project, the
velocity is ``noise - data``, and the timestep ``1000 sigma``.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyvideo.models.attention import Layout, QueryKeyValue, unpatchify
from hyvideo.models.conditions import Condition
from hyvideo.models.gradient_mode import detached

Tables = tuple[Tensor, Tensor]  # cos and sin; shape of each: (tokens, heads, head dim / 2)


def forwards(transformer: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
    """Yield (module, forward pass) pairs of the modules whose forward pass this package
    replaces.
    """
    yield transformer, forward
    for block in transformer.transformer_blocks:
        yield block.attn1, attention


def forward(
    self: nn.Module,
    latents: Tensor,
    timestep: Tensor,
    conditions: Sequence[Condition],
    ends: Tensor | None = None,
) -> Tensor:
    """Return the velocity, with the shape of ``latents``.

    Args:
        latents: Noisy latents. Shape: (batch, channels, frames, height, width).
        timestep: ``1000 sigma``, float32 regardless of the model's dtype. Shape: (batch,).
        conditions: Text of each sample, without padding.
        ends: Ignored; Mochi does not use the end of a step.
    """
    batch, _, frames, height, width = latents.shape
    side = self.config.patch_size
    rows = height // side
    columns = width // side
    lengths = tuple(len(sample.text) for sample in conditions)
    texts = pad_sequence([sample.text for sample in conditions], batch_first=True)
    time, text = self.time_embed(
        1000 - timestep, texts, _mask(lengths, texts), hidden_dtype=latents.dtype
    )
    tokens = self.patch_embed(latents.transpose(1, 2).flatten(0, 1))
    tokens = tokens.unflatten(0, (batch, frames)).flatten(1, 2)  # (batch, tokens, dim)
    num_tokens = tokens.shape[1]
    tables = self.rope(
        self.pos_frequencies,
        frames,
        rows,
        columns,
        device=latents.device,
        dtype=torch.float32,
    )
    tables = tuple(self.sequence.split(table, 0) for table in tables)
    tokens = self.sequence.split(tokens, 1)
    layout = _layout(tables, lengths, num_tokens)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.transformer_blocks:
        # diffusers' block passes the last two arguments to `attention`, as mask and rotary tables.
        if recompute:
            tokens, text = self._gradient_checkpointing_func(
                block, tokens, text, time, layout, tables
            )
        else:
            tokens, text = block(tokens, text, time, layout, tables)
        if self.detaches_blocks:
            tokens = detached(tokens)
            text = detached(text)
    patches = self.sequence.join(self.proj_out(self.norm_out(tokens, time)), num_tokens)
    return -unpatchify(patches, (frames, rows, columns), (1, side, side), "pf ph pw c")


def attention(
    self: nn.Module,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    attention_mask: Layout,
    image_rotary_emb: Tables,
) -> tuple[Tensor, Tensor]:
    """Return image and text tokens after joint attention; replaces ``MochiAttention.forward``,
    whose names the arguments have.

    Shape of each: (batch, tokens, dim).
    """
    query, key, value = _by_head(self.heads, hidden_states, self.to_q, self.to_k, self.to_v)
    text_query, text_key, text_value = _by_head(
        self.heads, encoder_hidden_states, self.add_q_proj, self.add_k_proj, self.add_v_proj
    )
    image, text = self.sequence.attend(
        QueryKeyValue(
            rotated(self.norm_q(query), image_rotary_emb),
            rotated(self.norm_k(key), image_rotary_emb),
            value,
        ),
        QueryKeyValue(self.norm_added_q(text_query), self.norm_added_k(text_key), text_value),
        attention_mask,
    )
    linear, dropout = self.to_out
    image = dropout(linear(image.flatten(2)))
    text = text.flatten(2)
    if self.context_pre_only:  # the last block, whose text output is not used
        return image, text
    return image, self.to_add_out(text)


def rotated(heads: Tensor, tables: Tables) -> Tensor:
    """Return tokens with rotary embeddings, in float32 arithmetic.

    Each head has its own, learned frequencies, which get their gradient here. Shape: (batch,
    tokens, heads, head dim).
    """
    cos, sin = tables
    first, second = heads.float().unflatten(3, (-1, 2)).unbind(4)
    pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=4)
    return pairs.flatten(3).to(heads.dtype)


def _by_head(heads: int, tokens: Tensor, *projections: nn.Module) -> list[Tensor]:
    return [projection(tokens).unflatten(2, (heads, -1)) for projection in projections]


def _mask(lengths: Sequence[int], texts: Tensor) -> Tensor:
    """Return which tokens of padded texts are valid. Shape: (batch, tokens)."""
    positions = torch.arange(texts.shape[1], device=texts.device)
    return torch.stack([positions < length for length in lengths])


def _layout(tables: Tables, lengths: tuple[int, ...], num_tokens: int) -> Layout:
    """Return the layout with tables that do not rotate, as `rotated` does so before."""
    num_local, _, half = tables[0].shape
    identity = tables[0].new_ones(num_local, 2 * half)
    return Layout(identity, torch.zeros_like(identity), lengths, num_tokens)
