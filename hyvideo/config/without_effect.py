"""Settings that have no effect in a run, by arithmetic on the settings; reported at its start with the reason."""

import math
import statistics
from pathlib import Path

from hyvideo.config.objectives import traits_of
from hyvideo.config.run_plan import Plan, stochastic_transitions
from hyvideo.config.sections import RolloutSettings, TrustRegionSettings
from hyvideo.config.settings import TRAITS, Config
from hyvideo.data.templates import fill
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
    settings = config.trust_region
    if not traits_of(config.loss.objective).has_ratio:  # the rest concerns ratios
        return []
    strength = _strength_of_kl(config.kl_weights, config.rollout, settings, is_balanced=config.loss.use_grad_balancing)
    target = settings.kl_weight if settings.kl_target is None else settings.kl_target
    numbers = {"strength": strength, "pull": strength * math.sqrt(2 * target), "target": target, "weak": _WEAK}
    template = Path(__file__).with_suffix(".txt.jinja")
    return fill(template, config=config, plan=plan, **numbers).splitlines()


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
