"""Attention over trimmed text: no mask where every token is valid, a key mask where some are not.

diffusers' processor spreads the text mask over all pairs of tokens, in every layer: at 480x848 and 81 frames
that is a gigabyte per sample, and it keeps the fast attention kernels away. The mask is hardly ever needed.
Text can be cut to its valid tokens, which is exact: a masked token changes no other. Where the samples of a
batch differ in length, it is enough to hide the padding as keys, (batch, 1, 1, tokens); what the padding's
own queries give is read by nobody.

Whether all text is valid must be known without asking the GPU, and once more when a checkpointed block is
recomputed. The caller says it with `text_is_full`; a hook on ``transformer.rope`` adds it to the (cos, sin)
tuple, which travels to every block as an argument and is kept with the block's other arguments for the
recomputation.

The VAE has the same trouble in its one attention layer, and the same kind of cure: `install_causal_mask`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

# cos and sin, each (image tokens, head dim), and whether all text tokens are valid
RotaryTables = tuple[Tensor, Tensor, bool]


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
        attention_mask: Tensor | None = None,
        image_rotary_emb: RotaryTables | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attended image tokens and text tokens.

        Args:
            attn: The block's attention module, which has the projections.
            hidden_states: Image tokens. Shape: (batch, image tokens, dim).
            encoder_hidden_states: Text tokens, possibly none. Shape: (batch, text tokens, dim).
            attention_mask: True at valid text tokens. Shape: (batch, text tokens).
            image_rotary_emb: What the hook of `install` made of the rotary tables.
        """
        cos, sin, text_is_full = image_rotary_emb
        image = project_image(attn, hidden_states, (cos, sin))
        text = project_text(attn, encoder_hidden_states)
        joint = QueryKeyValue(*(torch.cat(pair, dim=1) for pair in zip(image, text)))
        mask = key_mask(attention_mask, hidden_states.shape[1], text_is_full=text_is_full)
        attended = attend(joint, mask)
        return project_out(attn, attended[:, : hidden_states.shape[1]], attended[:, hidden_states.shape[1] :])


def project_image(attn: nn.Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor]) -> QueryKeyValue:
    """Query, key and value of image tokens, normalised per head and rotated to their place in the video."""
    query, key, value = (
        linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v)
    )
    query = apply_rotary_emb(attn.norm_q(query), rotary, sequence_dim=1)
    key = apply_rotary_emb(attn.norm_k(key), rotary, sequence_dim=1)
    # Under autocast the norms give float32. Attention would round it later; rounding now halves the memory.
    return QueryKeyValue(query.to(value.dtype), key.to(value.dtype), value)


def project_text(attn: nn.Module, encoder_hidden_states: Tensor) -> QueryKeyValue:
    """Query, key and value of text tokens, normalised per head; text has no place in the video."""
    query, key, value = (
        linear(encoder_hidden_states).unflatten(2, (attn.heads, -1))
        for linear in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    )
    query, key = attn.norm_added_q(query), attn.norm_added_k(key)
    return QueryKeyValue(query.to(value.dtype), key.to(value.dtype), value)


def key_mask(text_mask: Tensor | None, num_image_tokens: int, *, text_is_full: bool) -> Tensor | None:
    """Which keys may be attended to, or None when all may. Shape: (batch, 1, 1, image tokens + text tokens).

    Args:
        text_mask: True at valid text tokens. Shape: (batch, text tokens).
        num_image_tokens: They stand before the text and are always valid.
        text_is_full: The caller's word that `text_mask` is True everywhere.
    """
    if text_mask is None:
        return None
    if text_is_full:
        # Reading the mask would wait for a GPU; on the CPU it is free and catches a false word in every test.
        if text_mask.device.type == "cpu" and not torch.compiler.is_compiling():
            assert text_mask.all(), "text_is_full was claimed for a batch with padded text"
        return None
    return F.pad(text_mask.bool(), (num_image_tokens, 0), value=True)[:, None, None]


def attend(joint: QueryKeyValue, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention. Shape: (batch, tokens, heads, head dim)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in joint)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def project_out(attn: nn.Module, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Output projections. Shape of each: (batch, tokens, heads, head dim) to (batch, tokens, dim)."""
    linear, dropout = attn.to_out
    return dropout(linear(image.flatten(2))), attn.to_add_out(text.flatten(2))


def install(transformer: nn.Module) -> None:
    """Gives every block the processor above and the rotary tables their third element. Twice is once.

    Set per block: ``transformer.set_attn_processor`` would replace the text refiner's processor too and break
    it.
    """
    for block in transformer.transformer_blocks:
        block.attn.set_processor(TrimmedTextAttnProcessor())
    if not hasattr(transformer.rope, "text_is_full"):
        transformer.rope.text_is_full = False
        transformer.rope.register_forward_hook(_append_text_is_full)


def _append_text_is_full(rope: nn.Module, inputs: tuple[Tensor], tables: tuple[Tensor, Tensor]) -> RotaryTables:
    return (*tables, rope.text_is_full)


@contextmanager
def text_is_full(transformer: nn.Module, full: bool) -> Iterator[None]:
    """Tells the forward passes within, by a Python bool, whether all text tokens of their batch are valid.

    True is a promise: LLM and ByT5 text are trimmed and of one length, and in text-to-video `image_embeds`
    has no tokens, because diffusers adds its (masked) tokens to the text. Outside, or with False, a key mask
    is built. The backward pass may run outside: the word is kept with each forward pass.

    Raises:
        ValueError: `install` has not been called on the transformer.
    """
    if not hasattr(transformer.rope, "text_is_full"):
        raise ValueError("text_is_full needs a transformer prepared by hyvideo.models.attention.install; call it first")
    before = transformer.rope.text_is_full
    transformer.rope.text_is_full = bool(full)
    try:
        yield
    finally:
        transformer.rope.text_is_full = before


def freeze_dead_parameters(transformer: nn.Module) -> list[str]:
    """Freezes what can never get a gradient, and gives the names of the frozen parameters.

    The text stream ends in the last block: nobody reads its last output, so the layers that only make it
    (``to_add_out`` and ``ff_context``) have no gradient. Optimizers and gradient reductions should not wait
    for one.
    """
    last = len(transformer.transformer_blocks) - 1
    dead = []
    for name in (f"transformer_blocks.{last}.attn.to_add_out", f"transformer_blocks.{last}.ff_context"):
        module = transformer.get_submodule(name).requires_grad_(False)
        dead += [parameter for parameter, _ in module.named_parameters(prefix=name)]
    return dead


def install_causal_mask(vae: nn.Module) -> None:
    """Gives the attention layers of this VAE the cached mask below, so that batches of two and more work.

    diffusers 0.42.1 makes a (batch, S, S) mask for (batch, 1, S, channels) queries, which fails beyond one
    sample, and fills it row by row in Python on every call.
    """
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = _causal_mask_for_any_batch


def _causal_mask_for_any_batch(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """diffusers' signature. The mask is the same for every sample, so `batch_size` has no part in it."""
    return causal_mask(n_frame, n_hw, dtype, device)


# A tiled decode has at most four shapes of tile: inner, right edge, bottom edge, corner. A mask is S^2 large,
# so no more are kept.
@functools.lru_cache(maxsize=4)
def causal_mask(num_frames: int, frame_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a token may look, its own frame and earlier ones, -inf elsewhere. Shape: (tokens, tokens)."""
    # Never an inference tensor: the cached mask may be wanted for a backward pass later.
    with torch.inference_mode(False):
        frame = torch.arange(num_frames, device=device).repeat_interleave(frame_tokens)
        mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
        return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))
