"""Metrics of an iteration: reward statistics, sums per denoising step, and means over the
updates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_QUANTILES = 21  # of the rewards and advantages of an iteration: 0, 5, ..., 100 %


@dataclass(frozen=True)
class UpdateResult:
    """Metrics of one optimizer update, averaged over its ranks, rollouts and steps."""

    metrics: dict[str, float]  # by name, as in metrics.jsonl
    num_terms: int  # (rollout, step) pairs
    # `sums_by_step` over all replicas; None if no denoising steps are trained
    by_step: Tensor | None = None


def reward_metrics(
    rewards: Tensor, advantages: Tensor, group_size: int, dimensions: Sequence[str]
) -> dict[str, float | list[float]]:
    """Return the reward metrics of an iteration over the scored rollouts: means, deviations, counts
    and quantiles.

    Shapes: rewards (rollouts, 1 + dimensions), the total in the first column; advantages
    (rollouts,).
    """
    scored = rewards[:, 0].isfinite()
    means = rewards[scored].nanmean(0).tolist()
    groups = torch.where(scored, rewards[:, 0], torch.nan).view(-1, group_size)
    deviations = ((groups - groups.nanmean(1, keepdim=True)) ** 2).nanmean(1).sqrt()
    has_two_scores = groups.isfinite().sum(1) >= 2
    by_group = advantages.view(-1, group_size)
    # groups without a contrast: all their scored rollouts have the advantage 0
    is_zero = ((by_group == 0) | by_group.isnan()).all(1) & (by_group == 0).any(1)
    return {f"reward/{name}": mean for name, mean in zip(dimensions, means[1:])} | {
        "reward/mean": means[0],
        "reward/std": deviations[has_two_scores].mean().item(),
        "reward/missing": float((~scored).sum()),
        "advantage/zero_groups": float(is_zero.sum()),
        "quantiles/reward": quantiles(rewards[:, 0]),
        "quantiles/advantage": quantiles(advantages),
    }


def quantiles(values: Tensor) -> list[float]:
    """Return evenly spaced quantiles of the finite values, from the smallest to the largest; empty
    without any.

    They have five significant digits, since every iteration writes them.
    """
    known = values[values.isfinite()].double()
    if not len(known):
        return []
    levels = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64, device=known.device)
    return [float(f"{value:.5g}") for value in known.quantile(levels).tolist()]


def sums_by_step(values: Tensor, deviations: Tensor, steps: Tensor, num_steps: int) -> Tensor:
    """Return for each denoising step: number of terms, sum of each value, largest deviation.

    Shapes: values (values, terms), deviations and steps (terms,), on the CPU; result (2 + values,
    num_steps).
    """
    sums = torch.zeros(2 + len(values), num_steps, dtype=torch.float64)
    counted = torch.cat([torch.ones(1, values.shape[1], dtype=torch.float64), values.double()])
    sums[:-1].index_add_(1, steps, counted)
    sums[-1].scatter_reduce_(0, steps, deviations.double(), "amax")
    return sums


def average(
    results: list[UpdateResult], *, deviation_names: tuple[str, str], by_step: Sequence[str] = ()
) -> dict[str, float | list[float | None]]:
    """Return the metrics of an iteration: means over its updates, weighted by their number of
    terms; empty without any.

    ``deviation_names`` are the names of the largest deviation of all updates, which each of them
    has measured, and of that of the first update, 0 up to rounding. ``by_step`` are the names of
    the values of `sums_by_step` before the last one, the KL; each becomes a list with one value per
    step.
    """
    if not results:
        return {}
    largest, of_first = deviation_names
    total = sum(result.num_terms for result in results)
    mean = {
        name: sum(r.metrics[name] * (r.num_terms / total) for r in results)
        for name in results[0].metrics
    }
    deviations = [result.metrics[largest] for result in results]
    mean |= {largest: max(deviations), of_first: deviations[0]}
    tables = [result.by_step for result in results if result.by_step is not None]
    if tables:
        mean |= _by_step(torch.stack(tables), largest, by_step)
    return mean


def _by_step(
    tables: Tensor, deviation_name: str, names: Sequence[str]
) -> dict[str, list[float | None]]:
    """Return lists with one value per denoising step, None for untrained steps.

    Shape: (updates, 2 + values, steps).
    """
    counts, *sums, kls = tables[:, :-1].sum(0)
    table = {_step_name(name): values / counts for name, values in zip(names, sums, strict=True)}
    table[_step_name(deviation_name)] = torch.where(counts > 0, tables[:, -1].amax(0), torch.nan)
    table["by_step/kl"] = kls / counts
    return {
        name: [v if math.isfinite(v) else None for v in values.tolist()]
        for name, values in table.items()
    }


def _step_name(name: str) -> str:
    """Return the name of a metric by denoising step: by_step/ratio_mean for policy/ratio_mean."""
    return f"by_step/{name.rpartition('/')[2]}"
