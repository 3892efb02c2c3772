"""Forward pass of CogVideoX's transformer: diffusers' layers and blocks, with attention that supports
sequence parallelism.

`diffusion` translates between the diffusion model and this project's velocities.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from diffusers.models.embeddings import get_3d_sincos_pos_embed
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyvideo.models.attention import Layout, QueryKeyValue, Size, unpatchify
from hyvideo.models.conditions import Condition
from hyvideo.models.gradient_mode import detached
from hyvideo.models.norms import layer_norm

from .diffusion import Diffusion


def finish(transformer: nn.Module) -> None:
    """Delete the buffer of a new model. Raises ValueError for other models than CogVideoX-2B."""
    config = transformer.config
    for name in ("use_rotary_positional_embeddings", "patch_size_t", "ofs_embed_dim"):
        if config[name]:
            raise ValueError(
                f"only CogVideoX-2B is supported, got {name}={config[name]}: the 5B models have "
                "rotary embeddings and another noise schedule"
            )
    if config.in_channels != config.out_channels:
        raise ValueError(
            "image-to-video models of CogVideoX are not supported, got in_channels="
            f"{config.in_channels} and out_channels={config.out_channels}; use CogVideoX-2B"
        )
    del transformer.patch_embed.pos_embedding


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
        conditions: Text of each sample; the encoder pads it, because this model has no mask.
        ends: Ignored; CogVideoX does not use the end of a step.
    """
    side = self.config.patch_size
    frames, height, width = latents.shape[2:]
    grid = (frames, height // side, width // side)
    diffusion = Diffusion((timestep / 1000).view(-1, 1, 1, 1, 1))
    time = self.time_embedding(self.time_proj(diffusion.times).to(latents.dtype))
    lengths = tuple(len(sample.text) for sample in conditions)
    texts = pad_sequence([sample.text for sample in conditions], batch_first=True)
    text = self.patch_embed.text_proj(texts)
    patches = self.patch_embed.proj(diffusion.inputs(latents).transpose(1, 2).flatten(0, 1))
    patches = patches.unflatten(0, (-1, frames)).flatten(3)  # (batch, frames, dim, rows * columns)
    tokens = patches.transpose(2, 3).flatten(1, 2)  # (batch, tokens, dim)
    tokens = tokens + positions(self, grid, tokens)
    num_tokens = tokens.shape[1]
    tokens = self.sequence.split(tokens, 1)
    layout = _layout(self.config.attention_head_dim, tokens, lengths, num_tokens)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    skipped = 0
    if self.step_cache:  # in generate.py (docs/add_a_model.md, rule 5)
        skipped, tokens, text = self.step_cache.start(tokens, text)
    for num_run, block in enumerate(list(self.transformer_blocks)[skipped:], start=skipped + 1):
        # diffusers' block passes the last argument to `attention`, as rotary tables.
        if recompute:
            tokens, text = self._gradient_checkpointing_func(block, tokens, text, time, layout)
        else:
            tokens, text = block(tokens, text, time, layout)
        if self.detaches_blocks:
            tokens, text = detached(tokens), detached(text)
        if self.step_cache:
            self.step_cache.keep(num_run, tokens, text)
    outputs = self.proj_out(self.norm_out(self.norm_final(tokens), temb=time))
    outputs = self.sequence.join(outputs, num_tokens)
    prediction = unpatchify(outputs, grid, (1, side, side), "c pf ph pw")
    return diffusion.velocity(latents, prediction)


def attention(
    self: nn.Module,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    image_rotary_emb: Layout,
) -> tuple[Tensor, Tensor]:
    """Return image and text tokens after joint attention; replaces ``Attention.forward``, whose
    names the arguments have.

    Shape of each: (batch, tokens, dim).
    """
    image, text = self.sequence.attend(
        _projected(self, hidden_states), _projected(self, encoder_hidden_states), image_rotary_emb
    )
    linear, dropout = self.to_out
    return dropout(linear(image.flatten(2))), dropout(linear(text.flatten(2)))


def positions(self: nn.Module, grid: Size, tokens: Tensor) -> Tensor:
    """Return the fixed embeddings of positions, in the dtype of ``tokens``.

    Shape: (image tokens, dim).
    """
    frames, rows, columns = grid
    table = get_3d_sincos_pos_embed(
        tokens.shape[2],
        (columns, rows),
        frames,
        self.config.spatial_interpolation_scale,
        self.config.temporal_interpolation_scale,
        device=tokens.device,
    )
    return table.flatten(0, 1).to(tokens.dtype)


def _projected(attention: nn.Module, tokens: Tensor) -> QueryKeyValue:
    """Return query, key and value; query and key are normalized in each head."""
    query, key, value = (
        projection(tokens).unflatten(2, (attention.heads, -1))
        for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    return QueryKeyValue(
        layer_norm(attention.norm_q, query), layer_norm(attention.norm_k, key), value
    )


def _layout(head_dim: int, tokens: Tensor, lengths: tuple[int, ...], num_tokens: int) -> Layout:
    """Return the layout with tables that do not rotate, because the positions are added."""
    ones = torch.ones(tokens.shape[1], head_dim, device=tokens.device)
    return Layout(ones, torch.zeros_like(ones), lengths, num_tokens)
