"""The numbers of an iteration: sums over training forwards, means over updates, statistics of the rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UpdateResult:
    """Means of one optimizer update over the ranks, rollouts and steps that it trained on."""

    metrics: dict[str, float]
    num_terms: int  # (rollout, step) pairs


def reward_metrics(rewards: Tensor, advantages: Tensor, group_size: int, dimensions: Sequence[str]) -> dict[str, float]:
    """Means and spreads over the scored rollouts of an iteration.

    Shapes: rewards, the total and each dimension, (rollouts, 1 + dimensions); advantages (rollouts,).
    """
    scored = rewards[:, 0].isfinite()
    means = rewards[scored].nanmean(0).tolist()
    groups = torch.where(scored, rewards[:, 0], torch.nan).view(-1, group_size)
    deviations = ((groups - groups.nanmean(1, keepdim=True)) ** 2).nanmean(1).sqrt()
    can_differ = groups.isfinite().sum(1) >= 2
    by_group = advantages.view(-1, group_size)
    is_zero = ((by_group == 0) | by_group.isnan()).all(1) & (by_group == 0).any(1)
    return {f"reward/{name}": mean for name, mean in zip(dimensions, means[1:])} | {
        "reward/mean": means[0],
        "reward/std": deviations[can_differ].mean().item(),
        "reward/missing": float((~scored).sum()),
        "advantage/zero_groups": float(is_zero.sum()),
    }


def average(results: list[UpdateResult]) -> dict[str, float]:
    """Means over the updates of an iteration, weighted by their terms; empty for one without any.

    The ratio's deviation is the largest of all, and that of the first update, which sees the policy that made the
    rollouts: it must be 0 but for rounding.
    """
    if not results:
        return {}
    total = sum(result.num_terms for result in results)
    mean = {name: sum(r.metrics[name] * (r.num_terms / total) for r in results) for name in results[0].metrics}
    deviations = [result.metrics["policy/ratio_max_deviation"] for result in results]
    return mean | {"policy/ratio_max_deviation": max(deviations), "policy/ratio_first_deviation": deviations[0]}
