"""The forward pass of a transformer block with few passes over memory; the layers and the numbers are diffusers'.

The bytes between the products of a block take longer than they need to: each norm is one kernel here, which reads and
writes the computing precision and is float32 within, its modulation included.
"""

import torch
from torch import Tensor, nn

from hyvideo.models.attention import Layout, QueryKeyValue
from hyvideo.models.norms import modulated, rms_normalised


def forward(self: nn.Module, image: Tensor, text: Tensor, time: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Image tokens and text tokens after the block. Shape of each: (batch, tokens, dim); of ``time``: (batch, dim)."""
    norms = self.norm1, self.norm1_context
    # Shift, scale and gate of attention, then of the feed-forward network.
    of_image, of_text = (norm.linear(norm.silu(time)).unsqueeze(1).chunk(6, dim=2) for norm in norms)
    attended = self.attn(modulated(image, *of_image[:2]), modulated(text, *of_text[:2]), layout)
    image = torch.addcmul(image, attended[0], of_image[2])
    text = torch.addcmul(text, attended[1], of_text[2])
    del attended  # one tensor less beside the hidden layer
    image = torch.addcmul(image, self.ff(modulated(image, *of_image[3:5])), of_image[5])
    return image, torch.addcmul(text, self.ff_context(modulated(text, *of_text[3:5])), of_text[5])


def attention(self: nn.Module, image: Tensor, text: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return image and text tokens after joint attention; text is padded right. Shape of each: (batch, tokens, dim)."""
    of_image = self.to_q, self.to_k, self.to_v, self.norm_q, self.norm_k
    of_text = self.add_q_proj, self.add_k_proj, self.add_v_proj, self.norm_added_q, self.norm_added_k
    image, text = self.sequence.attend(
        _projected(image, self.heads, *of_image), _projected(text, self.heads, *of_text), layout
    )
    linear, dropout = self.to_out
    return dropout(linear(image.flatten(2))), self.to_add_out(text.flatten(2))


def _projected(tokens: Tensor, heads: int, to_query, to_key, to_value, norm_query, norm_key) -> QueryKeyValue:
    """Return query, key and value of tokens, the first two normalised per head."""
    query, key, value = (linear(tokens).unflatten(2, (heads, -1)) for linear in (to_query, to_key, to_value))
    return QueryKeyValue(rms_normalised(norm_query, query), rms_normalised(norm_key, key), value)
