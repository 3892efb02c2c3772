"""The numbers of an iteration: sums over training forwards, means over updates, statistics of the rewards."""

from dataclasses import dataclass

import torch
from torch import Tensor

DIMENSIONS = ("VQ", "MQ", "TA")

# What is summed over the terms of an update, in the order of Terms.sums.
SUMMED = (
    "loss/policy",
    "loss/total",
    "kl/position",
    "kl/velocity",
    "kl/total",
    "policy/ratio_mean",
    "policy/clip_fraction",
    "policy/log_prob",
)


@dataclass(frozen=True)
class Terms:
    loss: Tensor  # (batch,), with gradient
    sums: Tensor  # (len(SUMMED),)
    largest_deviation: Tensor  # () of a ratio from 1


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer update reports: means over the ranks, samples and steps it trained on."""

    metrics: dict[str, float]
    num_terms: int  # (rollout, step) pairs


def reward_metrics(rewards: Tensor, advantages: Tensor, group_size: int) -> dict[str, float]:
    """Over the rollouts of the round that were scored.

    Args:
        rewards: Total, VQ, MQ and TA. Shape: (rollouts, 4).
        advantages: Shape: (rollouts,).
    """
    scored = rewards[:, 0].isfinite()
    means = rewards[scored].mean(0).tolist()
    groups = torch.where(scored, rewards[:, 0], torch.nan).view(-1, group_size)
    deviations = (groups - groups.nanmean(1, keepdim=True)) ** 2
    spread = deviations.nanmean(1).sqrt().nanmean().item()
    is_zero = (advantages.view(-1, group_size) == 0).all(1)
    return {
        "reward/mean": means[0],
        "reward/std": spread,
        **{f"reward/{name}": mean for name, mean in zip(DIMENSIONS, means[1:])},
        "reward/overall": sum(means[1:]),
        "reward/missing": float((~scored).sum()),
        "advantage/zero_groups": float(is_zero.sum()),
    }


def average(results: list[UpdateResult]) -> dict[str, float]:
    """Means over the updates of a round, weighted by their terms; the largest of what is a maximum."""
    total = sum(result.num_terms for result in results)
    if not total:
        raise ValueError("no rollout of this round could be scored, so there is nothing to train on")
    names = results[0].metrics
    mean = {name: sum(r.metrics[name] * r.num_terms for r in results) / total for name in names}
    return mean | {
        "policy/ratio_max_deviation": max(result.metrics["policy/ratio_max_deviation"] for result in results)
    }
