"""Settings that look as if they had an effect in a run, but have none.

They are reported at its start.

Each case can cost a whole run, because its result looks like a comparison and is none. An option of
a feature that is off is not reported.
"""

import math
import statistics
from collections.abc import Collection, Iterator
from contextlib import suppress

from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import DPOSettings, GRPOSettings
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sampling import Sampling

MIN_VIDEOS_TO_STOP = 16  # fewest validation videos that can stop a run for reward hacking
_MIN_KL_OF_PAIRS = 0.01  # a hundredth of the measured weight
# gradient of the KL term, divided by the gradient of the policy loss, below which it is negligible
_WEAK = 1e-3


def settings_without_effect(inputs: RunInputs) -> list[str]:
    """Return a sentence ``SETTINGS: reason`` for each setting, or group of settings, that has no
    effect in this run.
    """
    config = inputs.config
    defaults = config.defaults
    changed = {name for name, value in config.flat().items() if value != defaults[name]}
    found = [
        *anchor_refreshed_after_every_update(inputs),
        *anchor_that_is_never_refreshed(config, changed),
        *prompts_beside_pairs(config, changed),
        *feedback_after_the_end(config, changed),
        *learning_rate_that_is_never_reached(config),
        *advantage_clip_that_never_binds(config, changed),
        *average_of_the_base_model(config),
        *muon_without_matrices(config, changed),
        *reward_hacking_with_too_few_videos(inputs),
        *negative_prompt_without_guidance(config, changed),
    ]
    if config.objective.has_ratio:
        found = [
            *clip_that_never_binds(inputs),
            *velocity_kl_with_one_update(inputs),
            *kl_that_is_too_weak(inputs),
            *found,
        ]
    if isinstance(config.objective, DPOSettings):
        found += kl_that_does_not_hold_pairs(config)
    return found


def clip_that_never_binds(inputs: RunInputs) -> Iterator[str]:
    """Yield clip_range if every ratio is 1."""
    config = inputs.config
    objective = config.objective
    if inputs.plan.clip_can_bind:
        return
    # With one sample per forward pass, rollout and update have equal shapes, and ratios are 1 in
    # bf16 too.
    rounds = config.model.dtype == "bf16" and config.is_batched
    reason = "with num_updates_per_rollout 1 every ratio is 1, so nothing is clipped"
    if rounds and objective.gate_tolerance is None and objective.gate_interval > 0:
        reason += "; it only sets the tolerance of the on-policy check"
    yield f"clip_range {objective.clip_range:g}: {reason}"


def velocity_kl_with_one_update(inputs: RunInputs) -> Iterator[str]:
    """Yield the velocity KL if the policy of an update is always the policy of its rollouts."""
    objective = inputs.config.objective
    if inputs.plan.clip_can_bind or not objective.measures_velocity:
        return
    if objective.kl_velocity == "log_ratio":
        yield (
            "the velocity KL (kl_velocity log_ratio): with num_updates_per_rollout 1 it is 0 and "
            "its gradient is 0 on average; use kl_velocity gaussian or more updates"
        )
    else:
        yield (
            "the velocity KL (kl_velocity gaussian): with num_updates_per_rollout 1 the policy "
            "equals the rollout policy; use more updates"
        )


def anchor_refreshed_after_every_update(inputs: RunInputs) -> Iterator[str]:
    config = inputs.config
    objective = config.objective
    if objective.anchor_moves and objective.update_ref_model_step == inputs.plan.updates == 1:
        yield (
            "the position KL: update_ref_model_step 1 refreshes the anchor after every update, so "
            "the distance is always 0"
        )


def anchor_that_is_never_refreshed(config: Config, changed: Collection[str]) -> Iterator[str]:
    """Yield a refresh that would come after the last update, when the anchor is no longer used."""
    objective = config.objective
    if not objective.anchor_moves or "update_ref_model_step" not in changed:
        return
    if objective.update_ref_model_step >= config.num_updates:
        yield (
            f"update_ref_model_step: the run has {config.num_updates} updates, so the anchor stays "
            "the initial policy"
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


def kl_that_does_not_hold_pairs(config: Config) -> Iterator[str]:
    """Yield kl_weight if the KL cannot keep the winners of rated pairs likely."""
    weight = config.objective.kl_weight
    if weight < _MIN_KL_OF_PAIRS:
        yield (
            f"kl_weight {weight:g}: below {_MIN_KL_OF_PAIRS:g} the KL of objective "
            f"{config.objective.name} is too weak to keep the winners' videos likely; 1 was "
            "measured"
        )


def prompts_beside_pairs(config: Config, changed: Collection[str]) -> Iterator[str]:
    if config.objective.videos_from and "prompts_csv" in changed:
        objective = config.objective
        yield (
            f"prompts_csv: objective {objective.name} trains on the prompts of "
            f"{objective.videos_from}"
        )


def feedback_after_the_end(config: Config, changed: Collection[str]) -> Iterator[str]:
    """Yield the settings of a feedback that would start after the last update.

    The first feedback follows update w + 1 and affects update w + 2, where w is the number of
    warm-up updates.
    """
    settings = config.objective
    names = [
        name for name in ("kl_feedback", "kl_window", "kl_gain", "kl_target") if name in changed
    ]
    if not names or settings.strategy == "none" or settings.kl_schedule != "adaptive":
        return
    if config.num_updates <= math.ceil(config.kl_warmup) + 1:
        yield (
            f"{', '.join(names)}: the run has {config.num_updates} updates, and the feedback "
            f"starts after kl_warmup_updates {settings.kl_warmup_updates}"
        )


def learning_rate_that_is_never_reached(config: Config) -> Iterator[str]:
    warmup = config.optimizer.warmup_steps
    if warmup > config.num_updates:
        yield (
            f"learning_rate, warmup_steps: the run has {config.num_updates} updates and "
            f"warmup_steps {warmup}, so the learning rate ends at "
            f"{config.num_updates / warmup:.0%} of {config.optimizer.learning_rate:g}"
        )


def advantage_clip_that_never_binds(config: Config, changed: Collection[str]) -> Iterator[str]:
    """Yield a clip above the largest advantage: that of a rollout with reward 1 in a group of
    rewards 0.
    """
    group_size = config.rollout.num_generations
    largest = math.sqrt(group_size - 1)
    if config.reward.advantage_clip >= largest and "advantage_clip" in changed:
        yield f"advantage_clip: with num_generations {group_size} no advantage exceeds {largest:.3g}"


def average_of_the_base_model(config: Config) -> Iterator[str]:
    left = config.optimizer.ema_decay**config.num_updates
    if left > 0.5:
        yield (
            f"ema_decay: after the {config.num_updates} updates of the run, {left:.0%} of the EMA "
            "is still the base model"
        )


def muon_without_matrices(config: Config, changed: Collection[str]) -> Iterator[str]:
    """Yield Muon's momentum if AdamW trains all weights, because they are factors of a LoRA."""
    optimizer = config.optimizer
    if "muon_momentum" in changed and optimizer.lora_rank > 0 and optimizer.muon_scope == "hidden":
        yield "muon_momentum: muon_scope hidden trains LoRA factors with AdamW"


def reward_hacking_with_too_few_videos(inputs: RunInputs) -> Iterator[str]:
    record = inputs.config.record
    if record.on_reward_hacking == "warn":
        return
    with suppress(ValueError):  # `prompts_are_readable` reports unreadable files
        if len(inputs.validated) * record.validation_repeats < MIN_VIDEOS_TO_STOP:
            yield (
                f"on_reward_hacking: a validation needs {MIN_VIDEOS_TO_STOP} videos to stop a run; "
                "raise validation_repeats"
            )


def negative_prompt_without_guidance(config: Config, changed: Collection[str]) -> Iterator[str]:
    names = [name for name in ("negative_prompt", "guidance_interval") if name in changed]
    if names and not config.negative_requests:
        yield f"{', '.join(names)}: cfg_scale {config.rollout.cfg_scale:g} disables guidance"


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
