"""The clipped policy loss of GRPO, weighted by the equalizer."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Per-sample terms of one batch of (rollout, step) pairs; the caller divides by the number of terms."""

    terms: Tensor  # (batch,), with gradient
    ratio: Tensor  # (batch,), detached
    is_clipped: Tensor  # (batch,), where the ratio is outside the clip range


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, step_weights: Tensor, *, clip_range: float
) -> PolicyLoss:
    """``S max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip))`` with ``ratio = exp(log_prob - old_log_prob)``.

    Every argument has shape (batch,); ``log_prob`` carries the gradient. Source: method.md, 6.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clamped = ratio.clamp(1 - clip_range, 1 + clip_range)
    terms = step_weights * torch.maximum(-advantages * ratio, -advantages * clamped)
    return PolicyLoss(terms, ratio.detach(), (ratio.detach() - 1).abs() > clip_range)
