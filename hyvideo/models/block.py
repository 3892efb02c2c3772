"""The forward pass of a transformer block with the fewest passes over memory; the layers are diffusers'.

A block of 34,020 tokens moves more bytes than its arithmetic has time for, so each norm is one kernel: it reads and
writes the computing precision and is float32 within, its modulation included. diffusers' block computes the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyvideo.models.attention import Layout

_EPS = 1e-6  # of diffusers' norms


def forward(
    self: nn.Module,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: None,
    freqs_cis: Layout,
) -> tuple[Tensor, Tensor]:
    """Image tokens and text tokens after the block, under diffusers' names. Shape of each: (batch, tokens, dim).

    Args:
        temb: The time's embedding. Shape: (batch, dim).
    """
    image, text = hidden_states, encoder_hidden_states
    # Of attention and of the feed-forward network: shift, scale and gate.
    of_image, of_text = (
        norm.linear(norm.silu(temb)).unsqueeze(1).chunk(6, dim=2) for norm in (self.norm1, self.norm1_context)
    )
    attended = self.attn(
        modulated(image, of_image[0], of_image[1]),
        modulated(text, of_text[0], of_text[1]),
        image_rotary_emb=freqs_cis,
    )
    image = torch.addcmul(image, attended[0], of_image[2])
    text = torch.addcmul(text, attended[1], of_text[2])
    image = torch.addcmul(image, self.ff(modulated(image, of_image[3], of_image[4])), of_image[5])
    text = torch.addcmul(text, self.ff_context(modulated(text, of_text[3], of_text[4])), of_text[5])
    return image, text


def modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``norm(tokens) * (1 + scale) + shift``, in the precision of ``shift``. Shape: (batch, tokens, dim).

    Args:
        shift, scale: Shape: (batch, 1, dim).
    """
    size = tokens.shape[2:]
    if len(tokens) > 1:
        return torch.addcmul(shift, F.layer_norm(tokens, size, eps=_EPS), 1 + scale).to(shift.dtype)
    # One sample's modulation is the norm's own weight and bias: one kernel. CUDA's autocast would cast to float32
    # before it, and again for every layer after it.
    weight, bias = (value[0, 0].to(tokens.dtype) for value in (1 + scale, shift))
    with torch.autocast(tokens.device.type, enabled=False):
        return F.layer_norm(tokens, size, weight, bias, _EPS).to(shift.dtype)
