"""Norms in one or a few kernels, with inputs and outputs in the compute dtype and float32
arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPS = 1e-6  # as in diffusers' layer norms


def modulated_norm(tokens: Tensor, shift: Tensor, scale: Tensor, *, eps: float = _EPS) -> Tensor:
    """Return ``layer_norm(tokens) * (1 + scale) + shift`` in the dtype of ``shift``.

    Shape: (batch, tokens, dim).
    """
    size = tokens.shape[2:]
    if len(tokens) > 1:
        return torch.addcmul(shift, F.layer_norm(tokens, size, eps=eps), 1 + scale).to(shift.dtype)
    # A single sample's modulation is passed as the kernel's weight and bias. Autocast would cast
    # everything to float32.
    weight, bias = (value[0, 0].to(tokens.dtype) for value in (1 + scale, shift))
    with torch.autocast(tokens.device.type, enabled=False):
        return F.layer_norm(tokens, size, weight, bias, eps).to(shift.dtype)


def layer_norm(norm: nn.LayerNorm, tokens: Tensor) -> Tensor:
    """Return the layer norm with weights over the last dimension, in one kernel."""
    weight, bias = (value.to(tokens.dtype) for value in (norm.weight, norm.bias))
    with torch.autocast(tokens.device.type, enabled=False):
        return F.layer_norm(tokens, norm.normalized_shape, weight, bias, norm.eps)


def rms_norm(norm: nn.Module, tokens: Tensor) -> Tensor:
    """Return the RMS norm over the last dimension, in one kernel with float32 arithmetic."""
    with torch.autocast(tokens.device.type, enabled=False):
        return F.rms_norm(tokens, norm.weight.shape, norm.weight.to(tokens.dtype), norm.eps)


def channel_rms_norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    """Return the RMS norm over channels, in float32 or higher precision.

    Shape: (batch, channels, ...).
    """
    if hidden.is_cuda:
        return fused_channel_rms_norm(norm.gamma, hidden)
    squares = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).square()
    # diffusers clamps the length at 1e-12
    inverse_length = squares.sum(1, keepdim=True).clamp_min(1e-24).rsqrt()
    return (hidden * (inverse_length * norm.scale)).to(hidden.dtype) * norm.gamma


def fused_channel_rms_norm(gamma: Tensor, hidden: Tensor) -> Tensor:
    """Return the RMS norm over channels in one pass over channels-last memory; other inputs are
    first copied.
    """
    return F.rms_norm(hidden.movedim(1, -1), (len(gamma),), gamma.flatten(), eps=1e-24).movedim(
        -1, 1
    )
