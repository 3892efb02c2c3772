"""Settings that do nothing in the run that they are part of: said at the start, with the reason.

Most of a day can go into a setting that cannot change anything. What is listed is arithmetic, not advice.
"""

import math
import statistics
from collections.abc import Iterator

from hyvideo.config.run_plan import Plan, stochastic_transitions
from hyvideo.config.sections import RolloutSettings, TrustRegionSettings
from hyvideo.config.settings import TRAITS, Config
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


def _of_the_method(config: Config, plan: Plan) -> Iterator[str]:
    loss, settings = config.loss, config.trust_region
    if loss.objective == "nft":  # what follows is of ratios
        return
    if not plan.clip_can_bind:
        # Where samples go apart, rollout and update run the same shapes, and their ratios are 1 in bf16 too.
        is_default = config.model.dtype == "bf16" and loss.gate_tolerance is None and loss.gate_interval > 0
        yield (
            f"clip_range {loss.clip_range:g}: with num_updates_per_rollout 1 every ratio is 1 and nothing is clipped"
            + ("; it only sets the tolerance of the on-policy check" if is_default and config.is_batched else "")
        )
        if config.measures_velocity and settings.kl_velocity == "log_ratio":
            yield (
                "the velocity KL (kl_velocity log_ratio): with num_updates_per_rollout 1 it is 0 and its gradient is 0 "
                "on average; take kl_velocity gaussian or more updates"
            )
        elif config.measures_velocity:
            yield "the velocity KL (gaussian): with num_updates_per_rollout 1 the policy still equals the previous one"
    if loss.enable_timestep_permutation and plan.num_trained_steps == plan.stochastic_steps:
        yield "enable_timestep_permutation: an update trains all steps, and their order changes only rounding"
    if config.anchor_moves and settings.update_ref_model_step == plan.updates == 1:
        yield (
            "the position KL: update_ref_model_step 1 refreshes the anchor after every update, so the distance is "
            "always 0"
        )
    strength = _strength_of_kl(config.kl_strategy, config.rollout, settings, is_balanced=loss.use_grad_balancing)
    if strength:
        target = settings.kl_weight if settings.kl_target is None else settings.kl_target
        pull = strength * math.sqrt(2 * target)
        if pull < _WEAK:
            rounding = ", which bf16 rounds away" if config.model.dtype == "bf16" else ""
            forwards = config.num_branches * plan.num_anchor_steps if config.needs_anchor else 0
            saving = f"; its anchor takes {forwards} forwards a rollout: kl_weight 0 saves them, anchor_fraction a part"
            yield (
                f"kl_weight {settings.kl_weight:g}: at kl_target {target:g} the gradient of the KL term is at "
                f"most {pull:.1g} of that of an advantage of 1{rounding}; it has no effect below a distance of "
                f"{(_WEAK / strength) ** 2 / 2:.1g}{saving if forwards else ''}"
            )
    if loss.use_grad_balancing and plan.stochastic_steps == 1:
        yield "use_grad_balancing: only one step is stochastic, and its weight is 1"


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
