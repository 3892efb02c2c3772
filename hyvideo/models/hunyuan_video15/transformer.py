"""The transformer's forward pass over trimmed conditions, of any length per sample, without a mask or a wait.

diffusers' class has the layers. Its ``forward`` pads every text to 1,000 + 256 + 729 slots and asks the GPU, in
every call, which of them are valid. `install` gives a model the forward pass below instead: conditions come as one
tensor of valid tokens per sample, so every length is known on the host. The numbers are the same (tested against
the original's and diffusers').
"""

import functools
import types
from collections.abc import Sequence

import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15RotaryPosEmbed,
    HunyuanVideo15Transformer3DModel,
)
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyvideo.models.attention import Layout, TrimmedTextAttnProcessor, equal_runs
from hyvideo.models.hunyuan_video15.block import forward as block_forward

# Rows of cond_type_embed.
_TEXT, _GLYPH, _IMAGE = range(3)


class WholeSequence:
    """The image tokens of this process: all of them. ``distributed.sequence_parallel`` has the other answer."""

    def processor(self) -> TrimmedTextAttnProcessor:
        """The attention that goes with it."""
        return TrimmedTextAttnProcessor()

    def split(self, tokens: Tensor, dim: int) -> Tensor:
        """Part of this process of a tensor that has an entry along ``dim`` for each image token."""
        return tokens

    def join(self, tokens: Tensor, num_tokens: int) -> Tensor:
        """The image tokens of all processes. Shape: (batch, local tokens, dim) to (batch, num_tokens, dim)."""
        return tokens


def install(transformer: nn.Module, sequence: WholeSequence | None = None) -> None:
    """Gives a HunyuanVideo15Transformer3DModel the forward pass and the attention of this project. Twice is once.

    Set per block: ``transformer.set_attn_processor`` would replace the text refiner's processor too and break it.
    """
    is_first = not hasattr(transformer, "sequence")  # later, a block may have a recomputation around its forward pass
    transformer.sequence = sequence or WholeSequence()
    for block in transformer.transformer_blocks:
        block.attn.set_processor(transformer.sequence.processor())
        if is_first:
            block.forward = types.MethodType(block_forward, block)
    if is_first:
        transformer.forward = types.MethodType(forward, transformer)


def stock_twin(transformer: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """diffusers' model on the same weights, with its own forward pass and processors: to compare with.

    The weights are shared unless ``dtype`` is another one.
    """
    with torch.device("meta"):
        twin = HunyuanVideo15Transformer3DModel.from_config(transformer.config)
    state = {name: tensor.to(dtype) for name, tensor in transformer.state_dict().items()}
    twin.load_state_dict(state, strict=True, assign=True)
    return twin.eval()


def forward(
    self: nn.Module,
    hidden_states: Tensor,
    timestep: Tensor,
    texts: Sequence[Tensor],
    glyphs: Sequence[Tensor],
    images: Sequence[Tensor],
    timestep_r: Tensor | None = None,
) -> Tensor:
    """The velocity. Shape: (batch, out channels, frames, height, width).

    Args:
        hidden_states: Noisy latents, condition latents and mask. Shape: (batch, channels, frames, height, width).
        timestep: ``1000 sigma``, float32 whatever the precision of the model. Shape: (batch,).
        texts: Hidden states of the language model, of each sample, without padding. Shape: (tokens, text dim).
        glyphs: ByT5 states of quoted text, of each sample; no tokens without. Shape: (tokens, 1472).
        images: Vision features of each reference image; no tokens in text-to-video. Shape: (tokens, image dim).
        timestep_r: Where a MeanFlow model steps to. Shape: (batch,).
    """
    if timestep.dtype != torch.float32:
        raise ValueError(f"timesteps must be float32, got {timestep.dtype}: bf16 rounds 991.7 to 992")
    patch = (self.config.patch_size_t, self.config.patch_size, self.config.patch_size)
    grid = tuple(size // p for size, p in zip(hidden_states.shape[2:], patch))
    time = self.time_embed(timestep, timestep_r=timestep_r)
    image = self.x_embedder(hidden_states).contiguous()  # compiled, all blocks then share a graph
    num_tokens = image.shape[1]
    context, lengths = _context(self, timestep, texts, glyphs, images)
    tables = rotary_tables(grid, tuple(self.rope.rope_dim), self.rope.theta, image.device)
    cos, sin = (self.sequence.split(table, 0) for table in tables)
    layout = Layout(cos, sin, lengths, num_tokens)
    image = self.sequence.split(image, 1)
    recompute = torch.is_grad_enabled() and self.gradient_checkpointing
    for block in self.transformer_blocks:
        if recompute:
            image, context = self._gradient_checkpointing_func(block, image, context, time, None, layout)
        else:
            image, context = block(image, context, time, None, layout)
    # After the projection: 32 numbers for each token travel, not 2048.
    return _unpatch(self.sequence.join(self.proj_out(self.norm_out(image, time)), num_tokens), grid, patch)


def _context(
    model: nn.Module, timestep: Tensor, texts: Sequence[Tensor], glyphs: Sequence[Tensor], images: Sequence[Tensor]
) -> tuple[Tensor, tuple[int, ...]]:
    """Tokens of all conditions beside the video, padded on the right, and how many each sample has.

    Image features come first, then glyphs, then text, as in the original. Shape: (batch, tokens, dim).
    """
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


def _unpatch(tokens: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """Tokens back to a video, in memory of its own. Shape: (batch, channels, frames, height, width).

    A view would lose FSDP2's backward hook where somebody changes the output in place, so FSDP2 warns of one.
    """
    sizes = dict(zip(("f", "h", "w", "pf", "ph", "pw"), (*grid, *patch)))
    video = rearrange(tokens, "b (f h w) (c pf ph pw) -> b c (f pf) (h ph) (w pw)", **sizes)
    return video.clone() if video._is_view() else video  # patches of one pixel are moved without a copy


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
