"""The forward pass of a transformer block with few passes over memory; the layers and the numbers are diffusers'.

The bytes between the products of a block take longer than they need to: each norm is one kernel here, which reads and
writes the computing precision and is float32 within, its modulation included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyvideo.models.attention import Layout

_EPS = 1e-6  # of diffusers' norms


def forward(
    self: nn.Module, image: Tensor, text: Tensor, time: Tensor, mask: None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Image tokens and text tokens after the block. Shape of each: (batch, tokens, dim); of ``time``: (batch, dim)."""
    norms = self.norm1, self.norm1_context
    # Shift, scale and gate of attention, then of the feed-forward network.
    of_image, of_text = (norm.linear(norm.silu(time)).unsqueeze(1).chunk(6, dim=2) for norm in norms)
    attended = self.attn(modulated(image, *of_image[:2]), modulated(text, *of_text[:2]), image_rotary_emb=layout)
    image = torch.addcmul(image, attended[0], of_image[2])
    text = torch.addcmul(text, attended[1], of_text[2])
    del attended  # one tensor less beside the hidden layer
    image = torch.addcmul(image, self.ff(modulated(image, *of_image[3:5])), of_image[5])
    return image, torch.addcmul(text, self.ff_context(modulated(text, *of_text[3:5])), of_text[5])


def modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``norm(tokens) * (1 + scale) + shift``, in the precision of ``shift``. Shape: (batch, tokens, dim)."""
    size = tokens.shape[2:]
    if len(tokens) > 1:
        return torch.addcmul(shift, F.layer_norm(tokens, size, eps=_EPS), 1 + scale).to(shift.dtype)
    # One sample's modulation is the weight and bias of the norm's kernel. Autocast would cast to float32 before it.
    weight, bias = (value[0, 0].to(tokens.dtype) for value in (1 + scale, shift))
    with torch.autocast(tokens.device.type, enabled=False):
        return F.layer_norm(tokens, size, weight, bias, _EPS).to(shift.dtype)
