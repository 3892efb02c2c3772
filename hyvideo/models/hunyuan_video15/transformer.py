"""Forward pass of the transformer over trimmed conditions of any length, without masks or GPU
synchronization.

The layers belong to diffusers' class. Its ``forward`` pads the conditions to 1,000 + 256 + 729
tokens and synchronizes with the GPU in every call to find the valid ones. Here, each condition is a
tensor of its valid tokens, so all lengths are known on the host. The results match those of the
original and of diffusers (tested).
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyvideo.models import rotary
from hyvideo.models.attention import Layout, equal_runs, unpatchify
from hyvideo.models.conditions import Condition, check_timestep
from hyvideo.models.gradient_mode import detached
from hyvideo.models.hunyuan_video15.block import attention
from hyvideo.models.hunyuan_video15.block import forward as block_forward

# Rows of cond_type_embed.
_TEXT, _GLYPH, _IMAGE = range(3)


def forwards(transformer: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
    """Yield (module, forward pass) pairs of the modules whose forward pass this project
    replaces.
    """
    yield transformer, forward
    for block in transformer.transformer_blocks:
        yield block, block_forward
        yield block.attn, attention


def forward(
    self: nn.Module,
    latents: Tensor,
    timestep: Tensor,
    conditions: Sequence[Condition],
    ends: Tensor | None = None,
) -> Tensor:
    """Return the velocity. Shape: (batch, out channels, frames, height, width).

    Args:
        latents: Noisy latents. Shape: (batch, channels, frames, height, width).
        timestep: ``1000 sigma``, float32 regardless of the model's dtype. Shape: (batch,).
        conditions: Text, quoted text and reference image of each sample, without padding.
        ends: Timesteps at which the steps end, for a MeanFlow model. Shape: (batch,).
    """
    check_timestep(timestep)
    hidden_states = torch.cat((latents, _image_channels(latents, conditions)), dim=1)
    patch = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
    grid = tuple(size // p for size, p in zip(hidden_states.shape[2:], patch))
    time = self.time_embed(timestep, timestep_r=ends)
    image = self.x_embedder(hidden_states).contiguous()  # so that all compiled blocks share a graph
    num_tokens = image.shape[1]
    context, lengths = _context(self, timestep, conditions)
    tables = rotary_tables(grid, tuple(self.rope.rope_dim), self.rope.theta, image.device)
    cos, sin = (self.sequence.split(table, 0) for table in tables)
    layout = Layout(cos, sin, lengths, num_tokens)
    image = self.sequence.split(image, 1)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    modulations = [time] * len(self.transformer_blocks)
    if self.modulation_cache:
        modulations = self.modulation_cache.take()
    for block, modulation in zip(self.transformer_blocks, modulations):
        if recompute:
            image, context = self._gradient_checkpointing_func(
                block, image, context, modulation, layout
            )
        else:
            image, context = block(image, context, modulation, layout)
        if self.detaches_blocks:
            image = detached(image)
            context = detached(context)
    # Joined after the projection, so that ranks exchange 32 numbers per token instead of 2048.
    patches = self.sequence.join(self.proj_out(self.norm_out(image, time)), num_tokens)
    return unpatchify(patches, grid, patch, "c pf ph pw")


def _image_channels(latents: Tensor, conditions: Sequence[Condition]) -> Tensor:
    """Return the channels that follow the noisy latents: the reference image's latents in the first
    frame, and a mask.

    Shape: (batch, channels + 1, frames, height, width).
    """
    batch, channels, *sizes = latents.shape
    image_channels = latents.new_zeros(batch, channels + 1, *sizes)
    for row, condition in enumerate(conditions):
        if condition.image is not None:
            image_channels[row, :channels, 0] = condition.image.latents
            image_channels[row, channels, 0] = 1.0
    return image_channels


def _context(
    model: nn.Module, timestep: Tensor, conditions: Sequence[Condition]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the embedded tokens of all conditions, padded on the right, and the number of each
    sample's tokens.

    Image features come first, then quoted text, then text, as in the original. Shape: (batch,
    tokens, dim).
    """
    texts = [c.text for c in conditions]
    kinds = model.cond_type_embed.weight
    config = model.config
    zeros = texts[0].new_zeros
    glyphs = [zeros(0, config.text_embed_2_dim) if c.glyph is None else c.glyph for c in conditions]
    images = [
        zeros(0, config.image_embed_dim) if c.image is None else c.image.embeds for c in conditions
    ]
    text = _embedded(
        texts, lambda states, rows: model.context_embedder(states, timestep[rows]) + kinds[_TEXT]
    )
    glyph = _embedded(glyphs, lambda states, rows: model.context_embedder_2(states) + kinds[_GLYPH])
    image = _embedded(images, lambda states, rows: model.image_embedder(states) + kinds[_IMAGE])
    parts = list(zip(image, glyph, text))
    lengths = tuple(sum(len(part) for part in sample) for sample in parts)
    return pad_sequence([torch.cat(sample) for sample in parts], batch_first=True), lengths


def _embedded(samples: Sequence[Tensor], embed) -> list[Tensor]:
    """Embed the samples by ``embed(states, rows)``, called once per run of consecutive samples of
    equal length.

    Empty inputs also pass through the layer, so that its gradient is zero instead of missing. FSDP
    reduces only existing gradients: if they differed between ranks, the ranks would deadlock or add
    unrelated gradients.
    """
    embedded: list[Tensor] = []
    for rows, _ in equal_runs([len(sample) for sample in samples]):
        embedded += embed(torch.stack(list(samples[rows])), rows).unbind(0)
    return embedded


# Training and validation may use different video sizes. A table is 44 MB at 480x848 and 81 frames.
@functools.lru_cache(maxsize=4)
def rotary_tables(
    grid: tuple[int, int, int], rope_dim: tuple[int, ...], theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of all image token positions for `Layout`.

    Shape of each: (image tokens, head dim).
    """
    # Not inference tensors, because a later backward pass may need the cached tables.
    with torch.inference_mode(False):
        return rotary.rotary_tables(grid, rope_dim, theta, device=device, dtype=torch.float32)


def unused_modules(transformer: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers without a gradient, which only compute the last block's unused
    text output.
    """
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
    return f"{last}.attn.to_add_out", f"{last}.ff_context"
