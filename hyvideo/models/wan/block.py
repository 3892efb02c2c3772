"""Forward pass of a block of Wan's transformer, with diffusers' layers; a norm with its modulation
is one kernel.
"""

import torch
from torch import Tensor, nn

from hyvideo.models.attention import Layout, QueryKeyValue
from hyvideo.models.attention_kernels import scaled_dot_product
from hyvideo.models.norms import layer_norm, modulated_norm, rms_norm


def forward(
    self: nn.Module, tokens: Tensor, context: Tensor, time: Tensor, layout: Layout
) -> Tensor:
    """Return the tokens after the block. Shape: (batch, tokens, dim).

    Args:
        context: Embedded texts, including padding. Shape: (batch, 512, dim).
        time: Shift, scale and gate of self-attention, then of the feed-forward network, to which
            the block's table is added. Shape: (batch, 6, dim).
    """
    modulation = (self.scale_shift_table + time).to(tokens.dtype).chunk(6, dim=1)
    attended = _self_attention(
        self, modulated_norm(tokens, *modulation[:2], eps=self.norm1.eps), layout
    )
    tokens = torch.addcmul(tokens, attended, modulation[2])
    del attended  # lowers the peak, which is in the feed-forward network
    tokens = tokens + _cross_attention(self.attn2, layer_norm(self.norm2, tokens), context)
    hidden = self.ffn(modulated_norm(tokens, *modulation[3:5], eps=self.norm3.eps))
    return torch.addcmul(tokens, hidden, modulation[5])


def _self_attention(block: nn.Module, tokens: Tensor, layout: Layout) -> Tensor:
    """Return self-attention among the video's tokens on all ranks. Shape: (batch, tokens, dim)."""
    attended, _ = block.sequence.attend(_projected(block.attn1, tokens, tokens), None, layout)
    return block.attn1.to_out[0](attended.flatten(2))


def _cross_attention(attention: nn.Module, tokens: Tensor, context: Tensor) -> Tensor:
    """Return cross-attention of this rank's tokens to the text, including its padding.

    Shape: (batch, tokens, dim).
    """
    by_head = (tensor.transpose(1, 2) for tensor in _projected(attention, tokens, context))
    return attention.to_out[0](scaled_dot_product(*by_head).transpose(1, 2).flatten(2))


def _projected(attention: nn.Module, tokens: Tensor, context: Tensor) -> QueryKeyValue:
    """Return query, key and value; query and key are normalized over all heads together."""
    query = rms_norm(attention.norm_q, attention.to_q(tokens))
    key = rms_norm(attention.norm_k, attention.to_k(context))
    return QueryKeyValue(
        *(
            part.unflatten(2, (attention.heads, -1))
            for part in (query, key, attention.to_v(context))
        )
    )
