"""Settings that have no effect in a run, by arithmetic on the settings; reported at its start with the reason."""

import math
import statistics

from hyvideo.config.objectives import traits_of
from hyvideo.config.run_plan import Plan, stochastic_transitions
from hyvideo.config.sections import RolloutSettings, TrustRegionSettings
from hyvideo.config.settings import TRAITS, Config
from hyvideo.grpo.trust_region import KLWeights
from hyvideo.schedulers.transitions import sampler_of

_WEAK = 1e-3  # gradient of the KL term relative to that of the policy loss below which it is negligible


def settings_without_effect(config: Config, plan: Plan, world_size: int) -> list[str]:
    """Return a sentence for each setting, or group of settings, that has no effect in this run."""
    values, defaults = config.flat(), Config.of_version(config.model.transformer_version).flat()
    words = values | {
        "strategy": config.kl_strategy,
        "num_updates": config.num_updates,
        "greatest_advantage": math.sqrt(config.rollout.num_generations - 1),
        "left_of_base": config.optimizer.ema_decay**config.num_updates,
    }
    names: dict[str, list[str]] = {}
    for name, traits in TRAITS.items():
        if values[name] == defaults[name]:
            continue
        reason = next((condition.reason for condition in traits.unused if condition.holds(config, world_size)), None)
        if reason:
            names.setdefault(reason.format_map(words), []).append(name)
    return [*_unused_by_the_loss(config, plan), *(f"{', '.join(given)}: {reason}" for reason, given in names.items())]


def _unused_by_the_loss(config: Config, plan: Plan) -> list[str]:
    """Return a sentence for each part of the loss that has no effect; none without ratios."""
    loss = config.loss
    if not traits_of(loss.objective).has_ratio:
        return []
    sentences = [_unused_clipping(config, plan), _unused_velocity_kl(config, plan)]
    if loss.enable_timestep_permutation and plan.num_trained_steps == plan.stochastic_steps:
        sentences.append(
            "enable_timestep_permutation: an update trains all steps, so their order affects only rounding"
        )
    if config.anchor_moves and config.trust_region.update_ref_model_step == 1 and plan.updates == 1:
        sentences.append(
            "the position KL: update_ref_model_step 1 refreshes the anchor after every update, "
            "so the distance is always 0"
        )
    sentences.append(_negligible_kl(config, plan))
    if loss.use_grad_balancing and plan.stochastic_steps == 1:
        sentences.append("use_grad_balancing: the only stochastic step has weight 1")
    return [sentence for sentence in sentences if sentence]


def _unused_clipping(config: Config, plan: Plan) -> str:
    """Return why nothing is clipped; empty if a ratio can reach the clip range."""
    if plan.clip_can_bind:
        return ""
    loss = config.loss
    sentence = f"clip_range {loss.clip_range:g}: with num_updates_per_rollout 1 every ratio is 1, so nothing is clipped"
    has_default_tolerance = loss.gate_tolerance is None and loss.gate_interval > 0
    # With one sample per forward pass, rollout and update have equal shapes, and ratios are 1 in bf16 too.
    if has_default_tolerance and config.model.dtype == "bf16" and config.is_batched:
        sentence += "; it only sets the tolerance of the on-policy check"
    return sentence


def _unused_velocity_kl(config: Config, plan: Plan) -> str:
    """Return why the velocity KL, which is to the rollout policy, is 0; empty if it can be greater or is not used."""
    if plan.clip_can_bind or not config.measures_velocity:
        return ""
    if config.trust_region.kl_velocity == "log_ratio":
        return (
            "the velocity KL (kl_velocity log_ratio): with num_updates_per_rollout 1 it is 0 "
            "and its gradient is 0 on average; use kl_velocity gaussian or more updates"
        )
    return "the velocity KL (gaussian): with num_updates_per_rollout 1 the policy equals the rollout policy"


def _negligible_kl(config: Config, plan: Plan) -> str:
    """Return from which KL on the KL term has an effect, if its gradient at the target is negligible; else empty."""
    settings = config.trust_region
    strength = _strength_of_kl(config.kl_weights, config.rollout, settings, is_balanced=config.loss.use_grad_balancing)
    target = settings.kl_weight if settings.kl_target is None else settings.kl_target
    pull = strength * math.sqrt(2 * target)
    if strength == 0 or pull >= _WEAK:
        return ""
    sentence = (
        f"kl_weight {settings.kl_weight:g}: at kl_target {target:g} the gradient of the KL term is "
        f"at most {pull:.1g} times that of an advantage of 1"
    )
    if config.model.dtype == "bf16":
        sentence += ", which bf16 rounds away"
    sentence += f"; it has no effect below a KL of {(_WEAK / strength) ** 2 / 2:.1g}"
    if config.needs_anchor and plan.num_anchor_steps:
        forwards = config.num_branches * plan.num_anchor_steps
        sentence += (
            f"; the anchor costs {forwards} forward passes per rollout: "
            "kl_weight 0 saves all of them, anchor_fraction a part"
        )
    return sentence


def _strength_of_kl(
    weights: KLWeights, rollout: RolloutSettings, settings: TrustRegionSettings, *, is_balanced: bool
) -> float:
    """Return the gradient of the KL term divided by that of an advantage of 1 and by ``sqrt(2 KL)``; 0 without a KL.

    Gradients are with respect to the mean of a step, at the largest coefficient and the step with the largest quotient.
    With V = std^2 and n elements the norms are ``sqrt(2 KL / (n V))`` and, with equalizer weight S, ``S / sqrt(n V)``
    or, if the log-probability omits ``1 / (2 V)`` like that of cps, ``2 V S / sqrt(n V)``.
    """
    weight = weights.position + (weights.velocity if settings.kl_velocity == "gaussian" else 0.0)
    steps = stochastic_transitions(rollout)
    sampler = sampler_of(rollout.sde_type, rollout.reference_conventions)
    norms = [sampler.log_prob_grad_norm(step) for step in steps]
    balance = [statistics.median_low(norms) / norm if is_balanced else 1.0 for norm in norms]
    scales = [sampler.log_prob_scale(step) for step in steps]
    return settings.kl_weight * weight / min(scale * factor for scale, factor in zip(scales, balance))
