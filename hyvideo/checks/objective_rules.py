"""Rules of all objectives: what trained steps, noise levels, reward gradients and anchors need. Each
objective adds its own (`ObjectiveSettings.problems`).
"""

import math
from contextlib import suppress

from hyvideo.models.versions import Version, version_defaults
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import SAMPLERS
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import num_stochastic_steps
from hyvideo.settings.objectives.base import ObjectiveSettings
from hyvideo.settings.problems import Problems, problem_of
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import RolloutSettings


def objective_problems(config: Config) -> Problems:
    """Yield what the objective cannot be used with."""
    objective = config.objective
    rollout = config.rollout
    version = version_defaults(config.model.transformer_version)
    if objective.trains == "steps":
        yield from problem_of(_some_step_is_stochastic, config.sampling, objective.window)
    elif objective.trains == "levels":
        yield from level_problems(objective, rollout, version)
    if not objective.videos_from:
        yield from problem_of(check_noise, version, "sde_type", config.sampling)
    yield from problem_of(check_noise, version, "validation_eta", config.validation_sampling)
    own = "low_noise_cfg_scale" if config.trained_expert == "low" else "cfg_scale"
    yield from objective.problems(
        rollout, guidance={own: config.policy_cfg_scale}, rows_per_pass=config.rows_per_pass
    )
    if objective.group_size not in (0, rollout.num_generations):
        yield (
            f"objective {objective.name} needs num_generations {objective.group_size}, which is its "
            f"default, got {rollout.num_generations}; remove num_generations"
        )
    if config.reward.ignore_rewards and objective.strategy == "none" and objective.scores_rollouts:
        yield (
            "ignore_rewards trains on the KL terms alone, got kl_strategy none, which leaves "
            "nothing to train on; set kl_weight and a strategy"
        )
    yield from anchor_problems(objective, config.policy_cfg_scale, version)
    if version.boundary is not None:
        yield from expert_problems(config, version.boundary)


def expert_problems(config: Config, boundary: float) -> Problems:
    """Yield trained steps of the other expert of a model of two, which is frozen."""
    objective, sampling, expert = config.objective, config.sampling, config.model.expert
    levels = sampling.levels[:-1]
    own = [step for step, level in enumerate(levels) if config.trains(level)]
    described = (
        f"the {expert}-noise expert of transformer_version {config.model.transformer_version}, "
        f"which predicts {'from' if expert == 'high' else 'below'} noise level {boundary:g}"
    )
    steps = (
        f"its steps are {own[0] + 1} to {own[-1] + 1} of {len(levels)}"
        if own
        else f"it has none of the {len(levels)} steps"
    )
    if objective.trains == "path":
        yield (
            f"objective {objective.name} trains all steps of a video, but expert {expert} trains "
            f"only {described}; {steps}. Use another objective"
        )
    elif objective.trains == "steps":
        with suppress(ValueError):  # `_some_step_is_stochastic` reports it
            trained = _trained_steps(sampling, objective.window)
            if not trained <= set(own):
                noisy = _stochastic_steps(sampling)
                own_noisy = [number for number, step in enumerate(noisy) if step in own]
                fix = "set expert, shift or grpo_sampling_steps so that it has one with noise"
                if own_noisy:
                    fix = f"set sde_window fixed:{own_noisy[0]}:{len(own_noisy)}, or a part of it"
                yield (
                    f"sde_window must select steps of {described}; {steps}, got "
                    f"{objective.window or 'all steps'}; {fix}"
                )
    elif objective.reward_weight > 0:
        if not own or own[-1] < len(levels) - 1:
            yield (
                f"a reward gradient trains the last step, got expert {expert}, {described}; "
                f"{steps}. Set expert low, or reward_gradient_weight 0"
            )


def _stochastic_steps(sampling: Sampling) -> list[int]:
    """Return the steps with noise, regardless of an SDE window."""
    return [step for step, each in enumerate(sampling.transitions()) if each.is_stochastic]


def _trained_steps(sampling: Sampling, window: str) -> set[int]:
    """Return the stochastic steps that some iteration trains. Raises ValueError for a window that
    does not fit.
    """
    stochastic = _stochastic_steps(sampling)
    chosen = parse_window(window, len(stochastic)) if stochastic else None
    if chosen is None:
        return set(stochastic)
    return {step for position in chosen.positions(stochastic) for step in position}


def check_noise(version: Version, setting: str, sampling: Sampling) -> None:
    """Raise ValueError if a flow map is sampled with noise that needs a velocity; ``setting`` adds
    it.
    """
    if (
        not version.is_flow_map
        or sampling.sampler not in SAMPLERS
        or sampling.sampler == "anchored"
    ):
        return
    if sampling.stochastic_transitions():
        raise ValueError(
            f"{setting} adds noise by {sampling.sampler}, which needs the velocity at a noise "
            f"level, but transformer_version {version.name} is a flow map, which predicts the mean "
            "velocity of a step, so the videos would not be those of the model; use the sampler "
            "anchored, or eta 0"
        )


def _some_step_is_stochastic(sampling: Sampling, window: str) -> None:
    """Raise ValueError if no step can be trained."""
    if num_stochastic_steps(sampling, window) == 0:
        raise ValueError(
            "the sampler must have at least one stochastic step to train, got none with sde_type "
            f"{sampling.sampler}, eta {sampling.eta}, {sampling.steps} steps and last_step "
            f"{sampling.last_step}; raise eta or grpo_sampling_steps"
        )


def level_problems(
    objective: ObjectiveSettings, rollout: RolloutSettings, version: Version
) -> Problems:
    """Yield what cannot be used with an objective that trains noise levels."""
    name = objective.name
    if version.kind == "step_distilled" and not version.is_flow_map:
        yield (
            f"objective {name} trains at any noise level, but transformer_version {version.name} "
            "is step-distilled and only covers the levels of its few steps; use another version or "
            "objective grpo"
        )
    needs_velocities = ""
    if objective.needs_velocities:
        needs_velocities = f"objective {name}"
    elif objective.reward_weight > 0:
        needs_velocities = "reward_gradient_weight"
    if version.is_flow_map and needs_velocities:
        yield (
            f"{needs_velocities} needs a model of velocities, but transformer_version "
            f"{version.name} is a flow map, which predicts the mean velocity of a step; use "
            "objective nft with reward_gradient_weight 0, or objective grpo"
        )
    if version.is_flow_map and rollout.cfg_scale > 1:
        yield (
            f"objective {name} needs cfg_scale 1 with the flow map {version.name}, because "
            "guided mean velocities are not the mean velocities of the guided model, got "
            f"{rollout.cfg_scale:g}; set cfg_scale 1"
        )
    if rollout.use_same_noise and rollout.eta == 0:
        yield (
            "use_same_noise needs eta above 0, because with eta 0 all rollouts of a group are "
            "identical, got 0; remove use_same_noise or raise eta"
        )


def anchor_problems(
    objective: ObjectiveSettings, policy_cfg_scale: float, version: Version
) -> Problems:
    """Yield coefficients and anchors that contradict each other."""
    strategy = objective.strategy
    scale = objective.anchor_cfg_scale or 1
    schedule = getattr(objective, "kl_schedule", "constant")
    if strategy != "none" and schedule != "constant" and objective.kl_coef > objective.kl_weight:
        yield (
            f"kl_coef must not exceed kl_weight, because kl_schedule {schedule} starts at kl_coef "
            f"and rises to kl_weight, got {objective.kl_coef:g} and {objective.kl_weight:g}; lower "
            "kl_coef or raise kl_weight"
        )
    if scale > 1 and version.kind.endswith("distilled"):
        yield (
            "anchor_cfg_scale must be 1 if guidance is distilled into the weights, got "
            f"{scale:g} with transformer_version {version.name}; set anchor_cfg_scale 1"
        )
    needs_fixed = {
        "anchor_path": bool(objective.anchor_path),
        "anchor_cfg_scale": objective.anchor_moves
        and objective.anchor_cfg_scale is not None
        and max(1.0, scale) != max(1.0, policy_cfg_scale),
    }
    for setting, is_given in needs_fixed.items():
        if is_given and not strategy.endswith("fixed"):
            yield (
                f"{setting} needs a fixed anchor, because a moving one becomes the policy, got "
                f"kl_strategy {strategy}; set kl_strategy fixed or dual_fixed, or remove {setting}"
            )
    if objective.anchor_moves and objective.update_ref_model_step % objective.updates:
        updates = objective.updates
        yield (
            "update_ref_model_step must be a multiple of num_updates_per_rollout, because the "
            f"anchor is refreshed between iterations, got {objective.update_ref_model_step} and "
            f"{updates}; use {math.ceil(objective.update_ref_model_step / updates) * updates}"
        )
