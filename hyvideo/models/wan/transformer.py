"""The forward pass of Wan's transformer on the layers of diffusers' class, whole or over a split sequence.

Texts come without padding and are padded with zeros to 512 tokens, which attention does not mask: the model was
trained so. Tables of rotary positions are computed when they are needed, because a model's buffers would be lost
when it is built without memory and rounded when it is cast.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn
from torch.func import functional_call

from hyvideo.models.attention import Layout, Size, video_of
from hyvideo.models.conditions import Condition, to_device
from hyvideo.models.wan.block import forward as block_forward
from hyvideo.models.wan.settings import TEXT_SLOTS


def finish(transformer: nn.Module) -> None:
    """Delete the buffers of a new WanTransformer3DModel. Raises ValueError for a model that needs an image."""
    config = transformer.config
    if config.image_dim or config.added_kv_proj_dim or config.in_channels != config.out_channels:
        raise ValueError(
            "an image-to-video model of Wan cannot be used, got "
            f"image_dim={config.image_dim}, in_channels={config.in_channels} and out_channels={config.out_channels}. "
            "Use a text-to-video model"
        )
    if not config.cross_attn_norm:
        raise ValueError("cross_attn_norm must be true, as in the released models of Wan, got false")
    del transformer.rope


def forwards(transformer: nn.Module) -> list[tuple[nn.Module, Callable]]:
    """Return the modules with a forward pass of this project, and that."""
    return [(transformer, forward), *((block, block_forward) for block in transformer.blocks)]


def forward(
    self: nn.Module, latents: Tensor, timestep: Tensor, conditions: Sequence[Condition], ends: Tensor | None = None
) -> Tensor:
    """Return the velocity. Shape: (batch, channels, frames, height, width).

    Args:
        latents: Noisy latents. Shape: (batch, channels, frames, height, width).
        timestep: ``1000 sigma``, float32 whatever the precision of the model. Shape: (batch,).
        conditions: Text of each sample, without padding.
        ends: Ignored; no version of Wan reads where a step ends.
    """
    if timestep.dtype != torch.float32:
        raise ValueError(f"timesteps must be float32, got {timestep.dtype}: bf16 rounds 991.7 to 992")
    patch = tuple(self.config.patch_size)
    grid = tuple(size // p for size, p in zip(latents.shape[2:], patch))
    context = self.condition_embedder.text_embedder(padded_texts(conditions))
    time, of_blocks = _time_embedding(self.condition_embedder, timestep)
    tables = rotary_tables(grid, self.config.attention_head_dim, self.config.rope_max_seq_len, latents.device)
    tokens = self.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()  # (batch, tokens, dim)
    num_tokens = tokens.shape[1]
    cos, sin = (self.sequence.split(table, 0) for table in tables)
    layout = Layout(cos, sin, (0,) * len(latents), num_tokens)
    tokens = self.sequence.split(tokens, 1)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.blocks:
        arguments = (tokens, context, of_blocks, layout)
        tokens = self._gradient_checkpointing_func(block, *arguments) if recompute else block(*arguments)
    # In float32, as in diffusers: a scale in bf16 would add 3 to 6 % to the error of the velocity in bf16.
    shift, scale = (self.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
    modulated = torch.addcmul(shift, self.norm_out(tokens.float()), 1 + scale).to(tokens.dtype)
    return video_of(self.sequence.join(self.proj_out(modulated), num_tokens), grid, patch, "pf ph pw c")


def stock_inputs(
    transformer: nn.Module, latents: Tensor, timestep: Tensor, conditions: Sequence[Condition]
) -> dict[str, Any]:
    """Return arguments of diffusers' own forward for the same samples."""
    texts = padded_texts(conditions)
    return {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": texts, "return_dict": False}


def padded_texts(conditions: Sequence[Condition]) -> Tensor:
    """Return the texts padded with zeros (batch, 512, dim). ValueError for a longer text or a reference image."""
    if any(one.image is not None for one in conditions):
        raise ValueError("Wan's text-to-video models take no reference image, got one. Leave the images out")
    if (longest := max(len(one.text) for one in conditions)) > TEXT_SLOTS:
        raise ValueError(f"a text must have at most {TEXT_SLOTS} tokens, got {longest}")
    return torch.stack([F.pad(one.text, (0, 0, 0, TEXT_SLOTS - len(one.text))) for one in conditions])


def _time_embedding(embedder: nn.Module, timestep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the timesteps embedded in float32. Shapes: (batch, dim) and, for the blocks, (batch, 6, dim)."""
    with torch.autocast(timestep.device.type, enabled=False):
        time = _in_float32(embedder.time_embedder, embedder.timesteps_proj(timestep))
        return time, _in_float32(embedder.time_proj, F.silu(time)).unflatten(1, (6, -1))


def _in_float32(module: nn.Module, values: Tensor) -> Tensor:
    """Call a module, and an adapter in it, on its parameters in float32."""
    return functional_call(module, {name: value.float() for name, value in module.named_parameters()}, values)


@functools.lru_cache(maxsize=4)  # one video size for training, perhaps another for validation
def rotary_tables(grid: Size, head_dim: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the positions, as a `Layout` has them. Shape of each: (tokens, head dim)."""
    if max(grid) > num_positions:
        raise ValueError(f"a side of the latents must have at most {num_positions} tokens, got {grid}")
    # Never inference tensors: the cached tables may be needed for a backward pass later.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        cos, sin = WanRotaryPosEmbed(head_dim, (1, 1, 1), num_positions)(torch.empty(1, 1, *grid))
        cos, sin = cos[0, :, 0], sin[0, :, 0]
        sin[:, ::2].neg_()  # the first of a pair is x cos - y sin
        return to_device(cos, device), to_device(sin, device)
