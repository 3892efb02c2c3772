"""Settings that do nothing in the run that they are part of: said at the start, with the reason.

Most of a day can go into a setting that cannot change anything. What is listed is arithmetic, not advice.
"""

import math
import statistics
from pathlib import Path

from hyvideo.config.run_plan import Plan, stochastic_transitions
from hyvideo.config.sections import RolloutSettings, TrustRegionSettings
from hyvideo.config.settings import TRAITS, Config
from hyvideo.data.templates import fill
from hyvideo.schedulers.transitions import sampler_of

# The KL term's pull against the policy's below which nobody will see it.
_WEAK = 1e-3


def settings_without_effect(config: Config, plan: Plan, world_size: int) -> list[str]:
    """A sentence for each setting, or group of them, that cannot change this run."""
    values, defaults = config.flat(), Config().flat()
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
    return [*_of_the_method(config, plan), *(f"{', '.join(given)}: {reason}" for reason, given in names.items())]


def _of_the_method(config: Config, plan: Plan) -> list[str]:
    settings = config.trust_region
    if config.loss.objective == "nft":  # what follows is of ratios
        return []
    strength = _strength_of_kl(config.kl_strategy, config.rollout, settings, is_balanced=config.loss.use_grad_balancing)
    target = settings.kl_weight if settings.kl_target is None else settings.kl_target
    numbers = {"strength": strength, "pull": strength * math.sqrt(2 * target), "target": target, "weak": _WEAK}
    template = Path(__file__).with_suffix(".txt.jinja")
    return fill(template, config=config, plan=plan, **numbers).splitlines()


def _strength_of_kl(
    strategy: str, rollout: RolloutSettings, settings: TrustRegionSettings, *, is_balanced: bool
) -> float:
    """The KL term's gradient in units of that of an advantage of 1, over ``sqrt(2 distance)``; 0 without a distance.

    Both with respect to the mean of a step, at the largest coefficient and the step where it is most. With V = std^2
    and n elements the norms are ``sqrt(2 distance / (n V))`` and, weighted by the equalizer, ``S / sqrt(n V)``; where
    the log-probability drops ``1 / (2 V)``, as that of cps, ``2 V S / sqrt(n V)``.
    """
    from hyvideo.grpo.trust_region import kl_weights  # imports torch

    weights = kl_weights(
        strategy, dual_position=settings.dual_kl_moving_weight, dual_velocity=settings.dual_kl_step_weight
    )
    weight = weights.position + (weights.velocity if settings.kl_velocity == "gaussian" else 0.0)
    steps = stochastic_transitions(rollout)
    sampler = sampler_of(rollout.sde_type)
    norms = [sampler.log_prob_grad_norm(step) for step in steps]
    balance = [statistics.median_low(norms) / norm if is_balanced else 1.0 for norm in norms]
    scales = [sampler.log_prob_scale(step) for step in steps]
    return settings.kl_weight * weight / min(scale * factor for scale, factor in zip(scales, balance))
