"""Rewards to group-relative advantages. A missing reward is NaN, goes in as NaN and comes out as NaN."""

import torch
from torch import Tensor

EPSILON = 1e-8
MAX_ADVANTAGE = 5.0


def group_advantages(rewards: Tensor, group_size: int, *, clip: float = MAX_ADVANTAGE) -> Tensor:
    """``(R - mean) / (std + 1e-8)`` within each group of consecutive rollouts, clipped. Source: method.md, 5.

    The standard deviation divides by the number of scored rollouts. A group whose rewards are all equal has
    advantage 0. A rollout without a finite reward is left out of its group's statistics and has advantage NaN; so
    have all rollouts of a group with fewer than two scored ones. The loss leaves NaN out.
    Shape: (groups * group_size,) to the same, in the dtype of ``rewards``.
    """
    if group_size < 1 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards must be a vector of whole groups of {group_size}, got shape {tuple(rewards.shape)}")
    # Float64: the rounding of a mean of equal float32 numbers is as large as epsilon.
    groups = rewards.detach().double().view(-1, group_size)
    scored = groups.isfinite()
    count = scored.sum(1, keepdim=True)
    mean = torch.where(scored, groups, 0.0).sum(1, keepdim=True) / count
    deviation = groups - mean
    variance = torch.where(scored, deviation**2, 0.0).sum(1, keepdim=True) / count
    advantages = (deviation / (variance.sqrt() + EPSILON)).clamp(-clip, clip)
    highest, lowest = (torch.where(scored, groups, bound) for bound in (-torch.inf, torch.inf))
    all_equal = highest.amax(1, keepdim=True) == lowest.amin(1, keepdim=True)
    advantages = torch.where(all_equal, 0.0, advantages)
    return torch.where(scored & (count >= 2), advantages, torch.nan).flatten().to(rewards.dtype)
