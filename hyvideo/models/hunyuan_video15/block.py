"""Memory-efficient forward pass of a transformer block, with diffusers' layers and the same
results.

The operations between matrix products are limited by memory bandwidth. Each norm, including its
modulation, is therefore a single kernel with inputs and outputs in the compute dtype and float32
arithmetic.
"""

import torch
from torch import Tensor, nn

from hyvideo.models.attention import Layout, QueryKeyValue
from hyvideo.models.norms import modulated_norm, rms_norm


def forward(
    self: nn.Module, image: Tensor, text: Tensor, time: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return image and text tokens after the block. Shape of each: (batch, tokens, dim).

    Args:
        time: Embedded timesteps (batch, dim), or the outputs of the modulation layers for image and
            text (batch, 2, 6 dim), from a `ModulationCache`.
    """
    if time.ndim == 3:
        modulations = time.unbind(1)
    else:
        modulations = [norm.linear(norm.silu(time)) for norm in (self.norm1, self.norm1_context)]
    # Shift, scale and gate of attention, then of the feed-forward network.
    image_mod, text_mod = (modulation.unsqueeze(1).chunk(6, dim=2) for modulation in modulations)
    attended = self.attn(
        modulated_norm(image, *image_mod[:2]), modulated_norm(text, *text_mod[:2]), layout
    )
    image = torch.addcmul(image, attended[0], image_mod[2])
    text = torch.addcmul(text, attended[1], text_mod[2])
    del attended  # lowers the peak, which is in the feed-forward network
    image = torch.addcmul(image, self.ff(modulated_norm(image, *image_mod[3:5])), image_mod[5])
    return image, torch.addcmul(
        text, self.ff_context(modulated_norm(text, *text_mod[3:5])), text_mod[5]
    )


def attention(
    self: nn.Module, image: Tensor, text: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return image and text tokens after joint attention; text is padded right.

    Shape of each: (batch, tokens, dim).
    """
    # Queries, keys and values have no names here, so that they are freed before the output layers.
    image, text = self.sequence.attend(
        _projected(image, self.heads, self.to_q, self.to_k, self.to_v, self.norm_q, self.norm_k),
        _projected(
            text,
            self.heads,
            self.add_q_proj,
            self.add_k_proj,
            self.add_v_proj,
            self.norm_added_q,
            self.norm_added_k,
        ),
        layout,
    )
    linear, dropout = self.to_out
    return dropout(linear(image.flatten(2))), self.to_add_out(text.flatten(2))


def _projected(
    tokens: Tensor, heads: int, to_query, to_key, to_value, norm_query, norm_key
) -> QueryKeyValue:
    """Return query, key and value of tokens; query and key are normalized per head."""
    query, key, value = (
        linear(tokens).unflatten(2, (heads, -1)) for linear in (to_query, to_key, to_value)
    )
    return QueryKeyValue(rms_norm(norm_query, query), rms_norm(norm_key, key), value)
