"""The forward pass of a transformer block with the fewest passes over memory; the layers are diffusers'.

A block of 34,020 tokens moves more bytes than its arithmetic has time for, so each norm is one kernel: it reads and
writes the computing precision and is float32 within, its modulation included. diffusers' block computes the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyvideo.models.attention import Layout


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

    The norm's own weight and bias are the modulation, which differs from sample to sample.

    Args:
        shift, scale: Shape: (batch, 1, dim).
    """
    if len(tokens) > 1:
        return torch.cat([modulated(*sample) for sample in zip(tokens.split(1), shift.split(1), scale.split(1))])
    weight, bias = ((value[0, 0]).to(tokens.dtype) for value in (1 + scale, shift))
    # CUDA's autocast would cast to float32 before the norm, and again for every layer after it.
    with torch.autocast(tokens.device.type, enabled=False):
        return F.layer_norm(tokens, weight.shape, weight, bias, eps=1e-6).to(shift.dtype)
