"""Arithmetic of an iteration: rollouts, groups, updates, steps and forward passes.

Imports no torch.
"""

from dataclasses import dataclass
from itertools import compress
from statistics import fmean

from hyvideo.schedulers.noise_window import parse_window
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling

# largest sensible std of a step relative to the noise level after it; eta 1 reaches 2.5 in 50 steps
MAX_NOISE = 5.0


@dataclass(frozen=True)
class Plan:
    """Counts of one iteration."""

    replicas: int  # data-parallel replicas
    rollouts: int
    groups: int  # prompts
    updates: int
    stochastic_steps: int
    num_trained_steps: int  # per rollout and update
    num_anchor_steps: int  # trained steps with a KL to the anchor; of distill, steps of the teacher
    num_reward_steps: int  # steps per rollout and update with a reward gradient: 0 or 1
    clip_can_bind: bool  # false: every ratio is 1
    sampled_branches: float  # forward passes per step, mean over the steps of a rollout
    # mean over the steps that can be trained; levels are distributed like the steps
    trained_branches: float
    anchor_branches: float  # like ``trained_branches``, with the anchor's guidance


def make_plan(config: Config, world_size: int = 1) -> Plan:
    """Return the plan of a run on ``world_size`` ranks.

    Call ``hyvideo.checks.rules.check`` first.
    """
    sampling = config.sampling
    objective = config.objective
    replicas = world_size // config.distributed.sp_size
    rollouts = num_rollouts(config, world_size)
    stochastic = num_stochastic_steps(sampling, objective.window)
    if objective.trains == "levels":
        trained = objective.nft_levels
    else:
        candidates = sampling.steps if objective.trains == "path" else stochastic
        trained = max(1, round(candidates * objective.timestep_fraction)) if candidates else 0
    num_reward_steps = 1 if objective.reward_weight > 0 else 0
    branches = sampling.branches()
    of_anchor = sampling.branches(config.anchor_guidance)
    measured = max(1, round(trained * getattr(objective, "anchor_fraction", 1.0)))
    # without levels, at the reward step
    num_anchor_steps = min(trained or num_reward_steps, measured)
    if objective.trains == "path":
        levels = sampling.divided(objective.anchor_substeps)[:-1]
        of_anchor = [config.anchor_guidance.num_branches(level) for level in levels]
        num_anchor_steps = trained * objective.anchor_substeps
    is_noisy = [
        step.is_stochastic and objective.trains == "steps" for step in sampling.transitions()
    ]
    return Plan(
        replicas=replicas,
        rollouts=rollouts,
        groups=rollouts // config.rollout.num_generations,
        updates=objective.updates,
        stochastic_steps=stochastic,
        num_trained_steps=trained,
        num_anchor_steps=num_anchor_steps,
        num_reward_steps=num_reward_steps,
        clip_can_bind=objective.updates > 1 and objective.has_ratio,
        sampled_branches=fmean(branches),
        trained_branches=fmean(list(compress(branches, is_noisy)) or branches),
        anchor_branches=fmean(list(compress(of_anchor, is_noisy)) or of_anchor),
    )


def num_rollouts(config: Config, world_size: int) -> int:
    """Return the rollouts of an iteration.

    Unlike `make_plan`, needs no file of a custom sampler or objective.
    """
    replicas = world_size // config.distributed.sp_size
    return replicas * config.rollout.batch_size * config.rollout.gradient_accumulation_steps


def num_stochastic_steps(sampling: Sampling, window: str) -> int:
    """Return the number of stochastic steps of a rollout, with an SDE window if there is one.

    Raises ValueError for a window that does not fit.
    """
    number = len(sampling.stochastic_transitions())
    chosen = parse_window(window, number) if number else None
    return chosen.length if chosen else number
