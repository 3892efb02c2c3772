"""Settings that look as if they had an effect in a run, but have none.

They are reported at its start.

Each case can cost a whole run, because its result looks like a comparison and is none. An option of
a feature that is off is not reported.
"""

import math
import statistics
from collections.abc import Iterator
from contextlib import suppress

from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings.objectives.base import ObjectiveSettings
from hyvideo.settings.objectives.grpo import GRPOSettings
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import OptimizerSettings

MIN_VIDEOS_TO_STOP = 16  # fewest validation videos that can stop a run for reward hacking
# gradient of the KL term, divided by the gradient of the policy loss, below which it is negligible
_WEAK = 1e-3


def settings_without_effect(inputs: RunInputs) -> list[str]:
    """Return a sentence ``SETTINGS: reason`` for each setting, or group of settings, that has no
    effect in this run.
    """
    config = inputs.config
    found = [
        *anchor_refreshed_after_every_update(config.objective),
        *schedules_of_longer_runs(config.optimizer, config.num_updates),
        *reward_hacking_with_too_few_videos(inputs),
        *modules_of_a_continued_lora(config.optimizer),
    ]
    if config.objective.has_ratio:
        found = [
            *velocity_kl_with_one_update(config.objective),
            *kl_that_is_too_weak(inputs),
            *found,
        ]
    return found


def velocity_kl_with_one_update(objective: ObjectiveSettings) -> Iterator[str]:
    """Yield the velocity KL if the policy of an update is always the policy of its rollouts."""
    if objective.updates == 1 and objective.measures_velocity:
        yield (
            f"the velocity KL (kl_velocity {objective.kl_velocity}): with num_updates_per_rollout "
            "1 the policy equals the rollout policy, so its gradient is 0 on average; use more "
            "updates, or kl_strategy fixed or moving"
        )


def anchor_refreshed_after_every_update(objective: ObjectiveSettings) -> Iterator[str]:
    if objective.anchor_moves and objective.update_ref_model_step == objective.updates == 1:
        yield (
            "the position KL: update_ref_model_step 1 refreshes the anchor after every update, so "
            "the distance is always 0"
        )


def kl_that_is_too_weak(inputs: RunInputs) -> Iterator[str]:
    """Yield kl_weight if the KL term at its target is negligible beside the policy loss."""
    config = inputs.config
    settings = config.objective
    strength = _strength_of_kl(config.sampling, settings)
    target = settings.kl_weight if settings.kl_target is None else settings.kl_target
    pull = strength * math.sqrt(2 * target)
    if not strength or pull >= _WEAK:
        return
    rounding = ", which bf16 rounds away" if config.model.dtype == "bf16" else ""
    sentence = (
        f"kl_weight {settings.kl_weight:g}: at kl_target {target:g} the gradient of the KL term is "
        f"at most {pull:.1g} times that of an advantage of 1{rounding}; it has no effect below a "
        f"KL of {(_WEAK / strength) ** 2 / 2:.1g}"
    )
    if settings.needs_anchor and inputs.plan.num_anchor_steps:
        forwards = config.num_branches * inputs.plan.num_anchor_steps
        sentence += (
            f"; the anchor costs {forwards} forward passes per rollout: kl_weight 0 saves all of "
            "them, anchor_fraction a part"
        )
    yield sentence


def schedules_of_longer_runs(optimizer: OptimizerSettings, num_updates: int) -> Iterator[str]:
    """Yield a learning rate that is not reached, and an EMA that stays the base model."""
    warmup = optimizer.warmup_steps
    if warmup > num_updates:
        yield (
            f"learning_rate, warmup_steps: the run has {num_updates} updates and warmup_steps "
            f"{warmup}, so the learning rate ends at {num_updates / warmup:.0%} of "
            f"{optimizer.learning_rate:g}"
        )
    left = optimizer.ema_decay**num_updates
    if left > 0.5:
        yield (
            f"ema_decay: after the {num_updates} updates of the run, {left:.0%} of the EMA is "
            "still the base model"
        )


def reward_hacking_with_too_few_videos(inputs: RunInputs) -> Iterator[str]:
    validation = inputs.config.validation
    if validation.on_reward_hacking == "warn":
        return
    with suppress(ValueError):  # `prompts_are_readable` reports unreadable files
        if len(inputs.validated) * validation.validation_repeats < MIN_VIDEOS_TO_STOP:
            yield (
                f"on_reward_hacking: a validation needs {MIN_VIDEOS_TO_STOP} videos to stop a run; "
                "raise validation_repeats"
            )


def modules_of_a_continued_lora(optimizer: OptimizerSettings) -> Iterator[str]:
    if optimizer.lora_target_modules and optimizer.pretrained_lora_path:
        yield (
            "lora_target_modules: the LoRA in pretrained_lora_path is trained further, so its modules "
            "are trained"
        )


def _strength_of_kl(sampling: Sampling, settings: GRPOSettings) -> float:
    """Return the gradient of the KL term divided by that of an advantage of 1 and by
    ``sqrt(2 KL)``; 0 without a KL.

    Gradients are with respect to the mean of a step, at the largest coefficient and the step with
    the largest quotient. With V = std^2 and n elements the norms are ``sqrt(2 KL / (n V))`` and,
    with equalizer weight S, ``S / sqrt(n V)`` or, if the log-probability omits ``1 / (2 V)`` like
    that of cps, ``2 V S / sqrt(n V)``.
    """
    weights = settings.kl_weights
    weight = weights.position + (weights.velocity if settings.kl_velocity == "gaussian" else 0.0)
    steps = sampling.stochastic_transitions()
    sampler = sampler_of(sampling.sampler, sampling.reference_conventions)
    norms = [sampler.log_prob_grad_norm(step) for step in steps]
    balance = [1.0] * len(norms)
    if settings.use_grad_balancing:
        balance = [statistics.median_low(norms) / norm for norm in norms]
    scales = [sampler.log_prob_scale(step) for step in steps]
    smallest = min(scale * factor for scale, factor in zip(scales, balance))
    return settings.kl_weight * weight / smallest
