"""Arithmetic of an iteration: rollouts, groups, updates, steps and forward passes.

Imports no torch.
"""

from dataclasses import dataclass
from itertools import compress
from statistics import fmean

from hyvideo.config.all_settings import RolloutSettings
from hyvideo.config.config import Config
from hyvideo.config.objectives import traits_of
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import (
    Transition,
    check_float32,
    levels_of_steps,
    refined_levels,
    schedule,
)

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

    Call ``hyvideo.config.rules.check`` first.
    """
    rollout, loss = config.rollout, config.loss
    replicas = world_size // config.distributed.sp_size
    rollouts = num_rollouts(config, world_size)
    stochastic = num_stochastic_steps(rollout)
    objective = traits_of(loss.objective)
    candidates = rollout.grpo_sampling_steps if objective.trains == "path" else stochastic
    trained = max(1, round(candidates * loss.timestep_fraction)) if candidates else 0
    if objective.trains == "levels":
        trained = loss.nft_levels
    num_reward_steps = 1 if loss.reward_gradient_weight > 0 else 0
    branches = branches_of_steps(rollout)
    of_anchor = branches_of_steps(rollout, config.anchor_cfg_scale)
    measured = max(1, round(trained * config.trust_region.anchor_fraction))
    # without levels, at the reward step
    num_anchor_steps = min(trained or num_reward_steps, measured)
    if objective.trains == "path":
        num_substeps = config.trust_region.anchor_substeps
        of_anchor = branches_at(
            teacher_levels(rollout, num_substeps), rollout, config.anchor_cfg_scale
        )
        num_anchor_steps = trained * num_substeps
    is_noisy = [step.is_stochastic and objective.trains == "steps" for step in transitions(rollout)]
    return Plan(
        replicas=replicas,
        rollouts=rollouts,
        groups=rollouts // rollout.num_generations,
        updates=loss.num_updates_per_rollout,
        stochastic_steps=stochastic,
        num_trained_steps=trained,
        num_anchor_steps=num_anchor_steps,
        num_reward_steps=num_reward_steps,
        clip_can_bind=loss.num_updates_per_rollout > 1 and objective.has_ratio,
        sampled_branches=fmean(branches),
        trained_branches=fmean(list(compress(branches, is_noisy)) or branches),
        anchor_branches=fmean(list(compress(of_anchor, is_noisy)) or of_anchor),
    )


def teacher_levels(rollout: RolloutSettings, num_substeps: int) -> tuple[float, ...]:
    """Return the noise levels of the teacher of objective distill, from 1 to 0."""
    return refined_levels(rollout.grpo_sampling_steps, rollout.shift, rollout.sigmas, num_substeps)


def num_rollouts(config: Config, world_size: int) -> int:
    """Return the rollouts of an iteration.

    Unlike `make_plan`, needs no file of a custom sampler or objective.
    """
    replicas = world_size // config.distributed.sp_size
    return replicas * config.rollout.batch_size * config.rollout.gradient_accumulation_steps


def stochastic_transitions(rollout: RolloutSettings) -> list[Transition]:
    """Return the stochastic steps of the schedule, regardless of an SDE window."""
    return [step for step in transitions(rollout) if step.is_stochastic]


def levels_of(rollout: RolloutSettings) -> tuple[float, ...]:
    """Return the noise levels of a rollout, from 1 to 0.

    Raises ValueError for invalid ``sigmas``.
    """
    return levels_of_steps(rollout.grpo_sampling_steps, rollout.shift, rollout.sigmas)


def transitions(rollout: RolloutSettings) -> tuple[Transition, ...]:
    """Return the steps of the schedule.

    Raises ValueError for an invalid sampler, as `schedule` does.
    """
    steps = schedule(
        rollout.sde_type,
        levels_of(rollout),
        rollout.eta,
        rollout.last_step,
        rollout.reference_conventions,
    )
    check_float32(rollout.sde_type, steps)
    return steps


def validation_transitions(config: Config) -> tuple[Transition, ...]:
    """Return the steps of a validation with noise.

    Raises ValueError for an invalid sampler, as `schedule` does.
    """
    record = config.record
    levels = levels_of_steps(
        record.validation_steps, config.validation_shift, config.validation_sigmas
    )
    sampler = config.validation_sampler
    steps = schedule(sampler, levels, config.validation_eta, "deterministic")
    check_float32(sampler, steps)
    return steps


def parse_interval(text: str) -> tuple[float, float]:
    """Return the lowest and highest noise level of a guidance_interval. Raises ValueError for
    invalid text.
    """
    try:
        low, high = map(float, (text or "0:1").split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low < high <= 1:
        raise ValueError(
            f"guidance_interval must be LOW:HIGH with 0 <= LOW < HIGH <= 1, got {text!r}"
        )
    return low - 1e-6, high + 1e-6  # levels in float32 are rounded


def branches_of_steps(rollout: RolloutSettings, scale: float | None = None) -> list[int]:
    """Return the number of forward passes of each step of a rollout, with guidance ``scale``
    (``cfg_scale``).
    """
    return branches_at(levels_of(rollout), rollout, rollout.cfg_scale if scale is None else scale)


def branches_at(levels: tuple[float, ...], rollout: RolloutSettings, scale: float) -> list[int]:
    """Return the number of forward passes of each step between these levels, with guidance
    ``scale``.
    """
    low, high = parse_interval(rollout.guidance_interval)
    return [2 if scale > 1 and low <= level <= high else 1 for level in levels[:-1]]


def num_stochastic_steps(rollout: RolloutSettings) -> int:
    """Return the number of stochastic steps of a rollout.

    Raises ValueError for a window that does not fit.
    """
    number = len(stochastic_transitions(rollout))
    window = parse_window(rollout.sde_window, number)
    return window.length if window else number
