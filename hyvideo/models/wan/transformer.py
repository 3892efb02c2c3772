"""Forward pass of Wan's transformer on the layers of diffusers' class, with optional sequence
parallelism.

Image-to-video of Wan2.1 and of Wan2.2 A14B reads the given video beside the noisy one: a mask of the
given frames, the first and perhaps the last, and its latents, in channels of their own. That of
Wan2.1 also attends to features of the given frames, of a CLIP model.

Another model that makes videos from a first frame (TI2V-5B) reads its latents without noise, at timestep
0, in place of the first latent frame. The velocity of that frame leads exactly to these latents and
does not depend on the weights, so that no sampler, log-probability or loss needs to know of it.

Texts are padded with zeros to 512 tokens, and attention does not mask the padding, as in the
model's training. Padding tokens are all equal, so the layers compute one of them and attention
repeats its key and value.

Rotary tables are computed on demand: as buffers, they would be lost on the meta device and rounded
when the model is cast.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hyvideo.models import rotary
from hyvideo.models.attention import Layout, Size, unpatchify
from hyvideo.models.conditions import Condition, check_timestep, to_device
from hyvideo.models.gradient_mode import detached
from hyvideo.models.norms import layer_norm
from hyvideo.models.wan.block import Context, TwoTimes
from hyvideo.models.wan.block import forward as block_forward
from hyvideo.models.wan.settings import TEXT_SLOTS, reads_given_video


def finish(transformer: nn.Module) -> None:
    """Delete the buffers of a new WanTransformer3DModel.

    Raises ValueError for an unsupported model.
    """
    config = transformer.config
    if reads_given_video(config):
        fits = bool(config.image_dim) == bool(config.added_kv_proj_dim)
    else:
        is_plain = not config.image_dim and not config.added_kv_proj_dim
        fits = is_plain and config.in_channels == config.out_channels
    if not fits:
        raise ValueError(
            "the input of a transformer of Wan must have its output channels, or for "
            "image-to-video also 4 of a mask and those of the given video, where image_dim and "
            f"added_kv_proj_dim come together, got in_channels={config.in_channels}, "
            f"out_channels={config.out_channels}, image_dim={config.image_dim} and "
            f"added_kv_proj_dim={config.added_kv_proj_dim}"
        )
    del transformer.rope


def finish_anyflow(transformer: nn.Module) -> None:
    """Delete the buffers of a new AnyFlowTransformer3DModel.

    Raises ValueError for an unsupported model.
    """
    config = transformer.config
    if config.image_dim or config.in_channels != config.out_channels:
        raise ValueError(
            f"image-to-video models of AnyFlow are not supported, got image_dim={config.image_dim}, "
            f"in_channels={config.in_channels} and out_channels={config.out_channels}. Use a "
            "text-to-video model"
        )
    del transformer.rope
    del transformer.condition_embedder.delta_emb_gate  # `gate_value` of the config


def forwards(transformer: nn.Module) -> list[tuple[nn.Module, Callable]]:
    """Return (module, forward pass) pairs of the modules whose forward pass this project
    replaces.
    """
    return [(transformer, forward), *((block, block_forward) for block in transformer.blocks)]


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
        conditions: Text and optional first frame of each sample, without padding.
        ends: Timesteps at which the steps end, for AnyFlow; other models ignore them. Shape:
            (batch,).
    """
    check_timestep(timestep)
    patch = tuple(self.config.patch_size)
    grid = tuple(size // p for size, p in zip(latents.shape[2:], patch))
    text = self.condition_embedder.text_embedder(padded_texts(conditions))
    pictures = None
    if self.config.image_dim:
        features = torch.stack([sample.image.embeds for sample in conditions]).to(text.dtype)
        pictures = _embedded_pictures(self.condition_embedder.image_embedder, features)
    context = Context(text, pictures)
    time, block_time = _time_embedding(self, timestep, ends)
    frames = None
    noisy = latents
    if reads_given_video(self.config):
        latents = with_given_video(conditions, latents)
    else:
        frames = first_frames(conditions, latents)
    if frames is not None:
        latents = frames.placed(latents)
        _, clean_time = _time_embedding(self, timestep * ~frames.is_given, ends)
    tables = rotary_tables(grid, self.config.attention_head_dim, latents.device)
    # (batch, tokens, dim)
    tokens = self.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
    num_tokens = tokens.shape[1]
    cos, sin = (self.sequence.split(table, 0) for table in tables)
    layout = Layout(cos, sin, (0,) * len(latents), num_tokens)
    tokens = self.sequence.split(tokens, 1)
    if frames is not None:
        is_clean = (torch.arange(num_tokens) < math.prod(grid[1:])).long()
        num_clean = int(self.sequence.split(is_clean, 0).sum())  # on the CPU
        block_time = TwoTimes(clean_time, block_time, num_clean)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.blocks:
        if recompute:
            tokens = self._gradient_checkpointing_func(block, tokens, context, block_time, layout)
        else:
            tokens = block(tokens, context, block_time, layout)
        if self.detaches_blocks:
            tokens = detached(tokens)
    patches = self.sequence.join(_projected(self, tokens, time), num_tokens)
    velocity = unpatchify(patches, grid, patch, "pf ph pw c")
    if frames is None:
        return velocity
    return frames.with_velocity(velocity, noisy, timestep)


def _embedded_pictures(embedder: nn.Module, features: Tensor) -> Tensor:
    """Return the tokens of the features of one picture, or of a first and a last one, which have
    positions.

    Shape: (batch, 257 or 514, image dim) to (batch, 257 or 514, dim).
    """
    if embedder.pos_embed is not None:
        features = features + embedder.pos_embed
    return layer_norm(embedder.norm2, embedder.ff(layer_norm(embedder.norm1, features)))


def _projected(model: nn.Module, tokens: Tensor, time: Tensor) -> Tensor:
    """Return the patches of the velocity. Shape: (batch, tokens, values of a patch)."""
    # In float32, as in diffusers; in bf16 the error of the bf16 velocity would be 3 to 6 % larger.
    shift, scale = (model.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
    modulated = torch.addcmul(shift, model.norm_out(tokens.float()), 1 + scale).to(tokens.dtype)
    return model.proj_out(modulated)


class FirstFrames(NamedTuple):
    """First latent frames of a batch, some of which are given."""

    latents: Tensor  # (batch, channels, height, width), float32; 0 where none is given
    is_given: Tensor  # (batch,)

    def placed(self, noisy: Tensor) -> Tensor:
        """Return latents with the given frames in place of the first ones."""
        first = torch.where(self._mask, self.latents.to(noisy.dtype), noisy[:, :, 0])
        return torch.cat((first.unsqueeze(2), noisy[:, :, 1:]), dim=2)

    def with_velocity(self, velocity: Tensor, noisy: Tensor, timestep: Tensor) -> Tensor:
        """Return the velocity, in float32, with the velocity of a straight path to the given frames:
        ``(noisy - latents) / sigma``.
        """
        sigma = (timestep / 1000).view(-1, 1, 1, 1)
        path = (noisy[:, :, 0].float() - self.latents) / sigma
        first = torch.where(self._mask, path, velocity[:, :, 0].float())
        return torch.cat((first.unsqueeze(2), velocity[:, :, 1:].float()), dim=2)

    @property
    def _mask(self) -> Tensor:
        return self.is_given.view(-1, 1, 1, 1)


def first_frames(conditions: Sequence[Condition], latents: Tensor) -> FirstFrames | None:
    """Return the first frames of the conditions; None if there are none."""
    if all(sample.image is None for sample in conditions):
        return None
    absent = torch.zeros_like(latents[0, :, 0], dtype=torch.float32)
    given = [absent if sample.image is None else sample.image.latents for sample in conditions]
    is_given = torch.tensor([sample.image is not None for sample in conditions])
    return FirstFrames(torch.stack(given), to_device(is_given, latents.device))


def with_given_video(conditions: Sequence[Condition], latents: Tensor) -> Tensor:
    """Return the noisy latents with the channels of the given videos after them.

    Shape: (batch, 2 channels + 4, frames, height, width).
    """
    given = torch.stack([sample.image.latents for sample in conditions]).to(latents.dtype)
    return torch.cat((latents, given), dim=1)


def padded_texts(conditions: Sequence[Condition]) -> Tensor:
    """Return the texts padded with zeros to one more token than the longest has, and at most to 512.

    The other tokens of the padding, up to the 512th, would be equal to the last one.
    Shape: (batch, tokens, dim).
    """
    num_tokens = min(max(len(sample.text) for sample in conditions) + 1, TEXT_SLOTS)
    return torch.stack(
        [F.pad(sample.text, (0, 0, 0, num_tokens - len(sample.text))) for sample in conditions]
    )


def _time_embedding(
    model: nn.Module, timestep: Tensor, ends: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the float32 embedding of timesteps (batch, dim), and its projection for the blocks
    (batch, 6, dim).

    AnyFlow adds an embedding of the end or the length of the step: ``(1 - g) time + g delta``.
    """
    embedder = model.condition_embedder
    with torch.autocast(timestep.device.type, enabled=False):
        time = _in_float32(embedder.time_embedder, embedder.timesteps_proj(timestep))
        if model.is_flow_map:
            gate = model.config.gate_value
            delta = ends if model.config.deltatime_type == "r" else timestep - ends
            embedded = _in_float32(embedder.delta_embedder, embedder.timesteps_proj(delta))
            time = (1 - gate) * time + gate * embedded
        return time, _in_float32(embedder.time_proj, F.silu(time)).unflatten(1, (6, -1))


def _in_float32(module: nn.Module, values: Tensor) -> Tensor:
    """Return the output of a module, including its adapters, computed with float32 copies of its
    parameters.
    """
    return functional_call(
        module, {name: value.float() for name, value in module.named_parameters()}, values
    )


@functools.lru_cache(maxsize=4)  # training and validation may use different video sizes
def rotary_tables(grid: Size, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of all token positions for `Layout`. Shape of each: (tokens, head dim).

    A third of a head is for the rows and a third for the columns, rounded down to pairs; the frames
    have the rest.
    """
    side = 2 * (head_dim // 6)
    dims = (head_dim - 2 * side, side, side)
    # Not inference tensors, because a later backward pass may need the cached tables.
    with torch.inference_mode(False):
        cos, sin = rotary.rotary_tables(
            grid, dims, 10_000.0, device=torch.device("cpu"), dtype=torch.float64
        )
        return to_device(cos, device), to_device(sin, device)
