"""Group-relative advantages. A failed reward is NaN, and so is its advantage."""

import torch
from torch import Tensor

EPSILON = 1e-8
MAX_ADVANTAGE = 5.0
# Rewards whose spread is at most this fraction of the largest one, or of 1, are equal: the spread
# is rounding of float64, or so far below EPSILON that no advantage exceeds 1e-6.
EQUAL = 1e-14


def group_advantages(rewards: Tensor, group_size: int, *, clip: float = MAX_ADVANTAGE) -> Tensor:
    """Return ``(R - mean) / (std + 1e-8)`` within each group of consecutive rollouts, clamped to
    ``[-clip, clip]``.

    ``std`` is the population standard deviation over the scored rollouts. A group of equal rewards,
    up to `EQUAL`, has advantage 0. A rollout without a finite reward is excluded from its group's
    statistics and has advantage NaN, like all rollouts of a group with fewer than two finite
    rewards. The loss excludes these rollouts. Source: arXiv:2603.21872, Section 3.1; GRPO,
    arXiv:2402.03300. Shape of input and output: (groups * group_size,).
    """
    if group_size < 1 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ValueError(
            f"rewards must be a vector of whole groups of {group_size}, got shape "
            f"{tuple(rewards.shape)}"
        )
    # In float32, the rounding error of the mean of equal rewards is as large as EPSILON.
    groups = rewards.detach().double().view(-1, group_size)
    scored = groups.isfinite()
    count = scored.sum(1, keepdim=True)
    mean = torch.where(scored, groups, 0.0).sum(1, keepdim=True) / count
    deviation = groups - mean
    variance = torch.where(scored, deviation**2, 0.0).sum(1, keepdim=True) / count
    advantages = (deviation / (variance.sqrt() + EPSILON)).clamp(-clip, clip)
    highest, lowest = (torch.where(scored, groups, bound) for bound in (-torch.inf, torch.inf))
    spread = highest.amax(1, keepdim=True) - lowest.amin(1, keepdim=True)
    largest = torch.where(scored, groups.abs(), 0.0).amax(1, keepdim=True)
    advantages = torch.where(spread <= EQUAL * largest.clamp(min=1.0), 0.0, advantages)
    return torch.where(scored & (count >= 2), advantages, torch.nan).flatten().to(rewards.dtype)


def normalized_rewards(scores: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """Return ``sum_d w_d (s_d - mean_d) / (std_d + 1e-8)``, with mean and std over the scored
    rollouts of a group.

    A dimension that is constant in a group contributes 0. The result is NaN for a rollout without
    all scores. Shapes: scores (groups * group_size, dimensions), weights (dimensions,) -> (groups *
    group_size,).
    """
    complete = torch.where(scores.isfinite().all(1, keepdim=True), scores, torch.nan)
    columns = [group_advantages(column, group_size, clip=torch.inf) for column in complete.T]
    return torch.stack(columns, dim=1) @ weights
