"""Checks of what an objective returns, and a trial of a custom one before the first rollouts.

The update makes the same checks in every pass, because the shapes of passes differ.
"""

import copy
from collections.abc import Collection

import torch
from torch import Tensor

from hyvideo.data.custom_code import check_tensor, named_errors
from hyvideo.data.randomness import normal
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.rewards.rewards import Reward
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import BUILT_IN
from hyvideo.training.objective import Objective, Terms
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex, forbid_changes


def new_objective(cls: type[Objective], config: Config, *parts: object) -> Objective:
    """Return a new objective. Raises ValueError for anything that a custom class raises."""
    if config.objective.name in BUILT_IN:
        return cls(config, *parts)
    with named_errors(f"objective {config.objective.name} cannot be created", cls.__module__):
        return cls(config, *parts)


def try_objective(
    objective: Objective,
    schedule: Schedule,
    condition: Conditions,  # of one prompt
    *,
    num_columns: int,  # trained steps or noise levels of a rollout
    dimensions: Collection[str],  # names of the scores
) -> None:
    """Run ``prepare`` and ``terms`` of a custom objective once, on random latents of the run's
    shape.

    Raises ValueError if they raise an error, change the rollouts, or return something unusable. The
    values are not checked, because nothing is known about them for random latents. All ranks
    together, because the forward pass has collectives.
    """
    trial = copy.copy(objective)  # attributes that it sets are forgotten
    trial.cost = copy.copy(objective.cost)
    rollouts = _random_rollouts(trial, schedule, condition, num_columns, dimensions)
    rows = list(range(objective.config.rows_per_pass))
    device = objective.pipeline.device
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        forbid_changes(rollouts, trial.name),
    ):
        what = (
            f"objective {objective.config.objective.name} failed in a trial on random latents, "
            "before the first rollouts"
        )
        with named_errors(what, type(objective).__module__):
            reference = trial.prepare(rollouts)
            terms = trial.terms(rollouts, reference, rows, 0, kl_coefficient=0.0)
    check_terms(terms, trial, rows)


def _random_rollouts(
    objective: Objective,
    schedule: Schedule,
    condition: Conditions,
    num_columns: int,
    dimensions: Collection[str],
) -> RolloutBatch:
    """Return a group of rollouts with random latents, with rewards 1 and -1 in turn."""
    count = max(2, objective.config.rows_per_pass)
    indices = [RolloutIndex(0, member) for member in range(count)]
    device = objective.pipeline.device
    schedule = objective.schedule(schedule, 1)
    num_steps = len(schedule.transitions)
    num_latents = num_steps + 1 if objective.keeps_all_latents else 3
    if objective.config.objective.videos_from:
        num_latents = 1

    def random(*shape: int) -> Tensor:
        return to_device(
            normal((count, *shape, *objective.noise.shape), 0, "trial objective"), device
        )

    values = [1.0 if row % 2 == 0 else -1.0 for row in range(count)]
    return RolloutBatch(
        indices=indices,
        prompts=["a trial"] * count,
        conditions=condition.select([0] * count),
        trajectories=Trajectories(
            latents=random(num_latents),
            log_probs=torch.zeros(count, num_steps, device=device),
            means=random(num_columns) if objective.needs_means else None,
        ),
        schedule=schedule,
        trained_steps=objective.draw(schedule, 1, indices, num_columns),
        anchor_columns=[0],
        iteration=1,
        rewards={
            row: Reward(value, dict.fromkeys(dimensions, value)) for row, value in enumerate(values)
        },
        advantages=torch.tensor(values, device=device),
        weights=torch.ones(count, device=device),
    )


def check_terms(terms: object, objective: Objective, rows: list[int]) -> None:
    """Raise ValueError if the result of ``terms`` has wrong types, shapes or names, or a loss
    without a gradient.
    """
    name = objective.name
    if not isinstance(terms, Terms):
        raise ValueError(f"`terms` of objective {name} must return `Terms`, got {terms!r:.80}")
    if not isinstance(terms.metrics, dict) or terms.metrics.keys() != set(objective.metrics):
        got = ", ".join(map(str, terms.metrics or ())) or "none"
        raise ValueError(
            f"`terms` of objective {name} must return the metrics that the class lists, "
            f"{', '.join(objective.metrics)}, got {got}; change `metrics` of the class or the "
            "result"
        )
    values = {"loss": terms.loss, "kl": terms.kl, "deviation": terms.deviation} | terms.metrics
    for what, value in values.items():
        check_tensor(
            value, (len(rows),), f"`terms` of objective {name}: {what}, one number per row,"
        )
    if not terms.loss.requires_grad:
        raise ValueError(
            f"`terms` of objective {name} must return a loss with a gradient, got one that is "
            "detached from the policy; compute it from the velocity of this pass"
        )
