"""The transformer's forward pass over trimmed conditions, of any length per sample, without a mask or a wait.

diffusers' class has the layers. Its ``forward`` pads every text to 1,000 + 256 + 729 slots and asks the GPU, in
every call, which of them are valid. In the forward pass below conditions come as one tensor of valid tokens per
sample, so every length is known on the host. The numbers are the same (tested against the original's and diffusers').
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyvideo.models.attention import Layout, equal_runs, video_of
from hyvideo.models.conditions import Condition
from hyvideo.models.hunyuan_video15.block import attention
from hyvideo.models.hunyuan_video15.block import forward as block_forward

# Rows of cond_type_embed.
_TEXT, _GLYPH, _IMAGE = range(3)
TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS = 1000, 256, 729  # to which the original pads, and diffusers


def forwards(transformer: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
    """Yield the modules with a forward pass of this project, and that."""
    yield transformer, forward
    for block in transformer.transformer_blocks:
        yield block, block_forward
        yield block.attn, attention


def forward(
    self: nn.Module, latents: Tensor, timestep: Tensor, conditions: Sequence[Condition], ends: Tensor | None = None
) -> Tensor:
    """Return the velocity. Shape: (batch, out channels, frames, height, width).

    Args:
        latents: Noisy latents. Shape: (batch, channels, frames, height, width).
        timestep: ``1000 sigma``, float32 whatever the precision of the model. Shape: (batch,).
        conditions: Text, quoted text and reference image of each sample, without padding.
        ends: Timesteps where the steps end, for a MeanFlow model. Shape: (batch,).
    """
    if timestep.dtype != torch.float32:
        raise ValueError(f"timesteps must be float32, got {timestep.dtype}: bf16 rounds 991.7 to 992")
    hidden_states = torch.cat([latents, _image_channels(latents, conditions)], dim=1)
    patch = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
    grid = tuple(size // p for size, p in zip(hidden_states.shape[2:], patch))
    time = self.time_embed(timestep, timestep_r=ends)
    image = self.x_embedder(hidden_states).contiguous()  # compiled, all blocks then share a graph
    num_tokens = image.shape[1]
    context, lengths = _context(self, timestep, conditions)
    tables = rotary_tables(grid, tuple(self.rope.rope_dim), self.rope.theta, image.device)
    cos, sin = (self.sequence.split(table, 0) for table in tables)
    layout = Layout(cos, sin, lengths, num_tokens)
    image = self.sequence.split(image, 1)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.transformer_blocks:
        arguments = (image, context, time, layout)
        image, context = self._gradient_checkpointing_func(block, *arguments) if recompute else block(*arguments)
    # After the projection: 32 numbers for each token travel, not 2048.
    patches = self.sequence.join(self.proj_out(self.norm_out(image, time)), num_tokens)
    return video_of(patches, grid, patch, "c pf ph pw")


def stock_inputs(
    transformer: nn.Module, latents: Tensor, timestep: Tensor, conditions: Sequence[Condition]
) -> dict[str, Any]:
    """Return arguments of diffusers' own forward for the same samples: padded conditions and their masks."""
    slots = TEXT_SLOTS, GLYPH_SLOTS, IMAGE_SLOTS
    padded, masks = zip(*map(_padded, _tokens_of(transformer, conditions), slots))
    return {
        "hidden_states": torch.cat([latents, _image_channels(latents, conditions)], dim=1),
        "timestep": timestep,
        "encoder_hidden_states": padded[0],
        "encoder_attention_mask": masks[0],
        "encoder_hidden_states_2": padded[1],
        "encoder_attention_mask_2": masks[1],
        "image_embeds": padded[2],
        "return_dict": False,
    }


def _padded(samples: Sequence[Tensor], slots: int) -> tuple[Tensor, Tensor]:
    """Return tokens padded with zeros to ``slots``, and a mask of the valid ones."""
    lengths = torch.tensor([len(sample) for sample in samples], device=samples[0].device)
    padded = torch.stack([F.pad(sample, (0, 0, 0, slots - len(sample))) for sample in samples])
    return padded, (torch.arange(slots, device=lengths.device) < lengths[:, None]).long()


def _image_channels(latents: Tensor, conditions: Sequence[Condition]) -> Tensor:
    """Return the channels beside the noisy latents: the first frame's latents, then a mask that is 1 where they are.

    Shape: (batch, channels + 1, frames, height, width).
    """
    batch, channels, *sizes = latents.shape
    beside = latents.new_zeros(batch, channels + 1, *sizes)
    for row, condition in enumerate(conditions):
        if condition.image is not None:
            beside[row, :channels, 0] = condition.image.latents
            beside[row, channels, 0] = 1.0
    return beside


def _tokens_of(model: nn.Module, conditions: Sequence[Condition]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return text, quoted text and image features (tokens, width) of each sample; no tokens where it has none."""
    texts = [one.text for one in conditions]
    zeros, config = texts[0].new_zeros, model.config
    glyphs = [zeros(0, config.text_embed_2_dim) if one.glyph is None else one.glyph for one in conditions]
    images = [zeros(0, config.image_embed_dim) if one.image is None else one.image.embeds for one in conditions]
    return texts, glyphs, images


def _context(model: nn.Module, timestep: Tensor, conditions: Sequence[Condition]) -> tuple[Tensor, tuple[int, ...]]:
    """Tokens of all conditions beside the video, padded on the right, and how many each sample has.

    Image features come first, then glyphs, then text, as in the original. Shape: (batch, tokens, dim).
    """
    texts, glyphs, images = _tokens_of(model, conditions)
    kinds = model.cond_type_embed.weight
    text = _embedded(texts, lambda states, rows: model.context_embedder(states, timestep[rows]) + kinds[_TEXT])
    glyph = _embedded(glyphs, lambda states, rows: model.context_embedder_2(states) + kinds[_GLYPH])
    image = _embedded(images, lambda states, rows: model.image_embedder(states) + kinds[_IMAGE])
    parts = list(zip(image, glyph, text))
    lengths = tuple(sum(len(part) for part in sample) for sample in parts)
    return pad_sequence([torch.cat(sample) for sample in parts], batch_first=True), lengths


def _embedded(samples: Sequence[Tensor], embed) -> list[Tensor]:
    """Samples after ``embed(states, rows)``, which gets neighbours of one length together.

    No tokens go through it too: the layer's gradient is then 0 and not absent. FSDP reduces the gradients that a rank
    has, so ranks with and without some would wait for each other, or add up what is not alike.
    """
    embedded: list[Tensor] = []
    for rows, _ in equal_runs([len(sample) for sample in samples]):
        embedded += embed(torch.stack(list(samples[rows])), rows).unbind(0)
    return embedded


# One video size for training, perhaps another for validation. A table is 44 MB at 480x848 and 81 frames.
@functools.lru_cache(maxsize=4)
def rotary_tables(
    grid: tuple[int, int, int], rope_dim: tuple[int, ...], theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of every image token's position, as a `Layout` has them. Shape of each: (image tokens, head dim)."""
    embed = HunyuanVideo15RotaryPosEmbed(1, 1, rope_dim, theta)
    # Never inference tensors: the cached tables may be wanted for a backward pass later.
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = embed(torch.empty(1, 1, *grid, device=device))
        sin[:, ::2].neg_()  # the first of a pair is x cos - y sin
        return cos, sin


def dead_modules(transformer: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers without a gradient: they only make the text's last output, which nothing reads."""
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}"
    return f"{last}.attn.to_add_out", f"{last}.ff_context"
