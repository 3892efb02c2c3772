"""Settings that do nothing in the run that they are part of: said at the start, with the reason.

Most of a day can go into a setting that cannot change anything. What is listed is arithmetic, not advice.
"""

import math
import statistics
from collections.abc import Iterator

from hyvideo.config.run_plan import Plan, needs_anchor
from hyvideo.config.settings import Config
from hyvideo.grpo.trust_region import kl_weights
from hyvideo.schedulers.transitions import log_prob_grad_norm, schedule, shifted_levels

# The KL term's pull against the policy's below which nobody will see it.
_WEAK = 1e-3


def settings_without_effect(config: Config, plan: Plan, world_size: int) -> list[str]:
    """A sentence for each setting, or group of them, that cannot change this run."""
    return [*_of_the_method(config, plan), *_without_their_partner(config, world_size)]


def _of_the_method(config: Config, plan: Plan) -> Iterator[str]:
    loss, settings = config.loss, config.trust_region
    if plan.ratio_must_be_one:
        is_tolerance = config.model.dtype == "bf16" and loss.gate_tolerance is None and loss.gate_interval > 0
        yield (
            f"clip_range {loss.clip_range:g}: with num_updates_per_rollout 1 every ratio is 1, and a clip never binds"
            + ("; it is the gate's tolerance only" if is_tolerance else "")
        )
        steps = config.kl_strategy == "stepwise" or config.kl_strategy.startswith("dual")
        if steps and settings.kl_velocity == "log_ratio":
            yield (
                "the velocity KL (kl_velocity log_ratio): with num_updates_per_rollout 1 it is 0 and its gradient is 0 "
                "on average; take kl_velocity gaussian or more updates"
            )
        elif steps:
            yield "the velocity KL (gaussian): with num_updates_per_rollout 1 the policy still is the last one"
    if loss.enable_timestep_permutation and plan.trained_steps == plan.stochastic_steps:
        yield "enable_timestep_permutation: an update has all steps, and their order changes rounding only"
    if needs_anchor(config) and config.kl_strategy.endswith("moving"):
        if settings.update_ref_model_step == plan.updates == 1:
            yield (
                "the position KL: update_ref_model_step 1 refreshes the anchor after every update, and the distance is "
                "always 0"
            )
    if strength := _strength_of_kl(config):
        target = settings.kl_weight if settings.kl_target is None else settings.kl_target
        pull = strength * math.sqrt(2 * target)
        if pull < _WEAK:
            yield (
                f"kl_weight {settings.kl_weight:g}: at a distance of kl_target {target:g} the KL term pulls with at "
                f"most {pull:.1g} of the force of an advantage of 1; it holds nothing before the distance is "
                f"{(_WEAK / strength) ** 2 / 2:.1g}"
            )
    if loss.use_grad_balancing and plan.stochastic_steps == 1:
        yield "use_grad_balancing: one step is stochastic, and its weight is 1"


def _strength_of_kl(config: Config) -> float:
    """The KL term's gradient in units of that of an advantage of 1, over ``sqrt(2 distance)``; 0 without a distance.

    Both with respect to the mean of a step, at the largest coefficient and the step where it is most. With V = std^2
    and n elements the norms are ``sqrt(2 distance / (n V))`` and, weighted by the equalizer, ``S / sqrt(n V)``; for
    cps, whose log-probability drops ``1 / (2 V)``, ``2 V S / sqrt(n V)``.
    """
    rollout, settings = config.rollout, config.trust_region
    weights = kl_weights(
        config.kl_strategy, dual_position=settings.dual_kl_moving_weight, dual_velocity=settings.dual_kl_step_weight
    )
    weight = weights.position + (weights.velocity if settings.kl_velocity == "gaussian" else 0.0)
    levels = shifted_levels(rollout.grpo_sampling_steps, rollout.shift)
    steps = [s for s in schedule(rollout.sde_type, levels, rollout.eta, rollout.last_step) if s.is_stochastic]
    norms = [log_prob_grad_norm(rollout.sde_type, step) for step in steps]
    balance = [statistics.median(norms) / norm if config.loss.use_grad_balancing else 1.0 for norm in norms]
    scales = [2 * step.std**2 if rollout.sde_type == "cps" else 1.0 for step in steps]
    return settings.kl_weight * weight / min(scale * factor for scale, factor in zip(scales, balance))


def _without_their_partner(config: Config, world_size: int) -> Iterator[str]:
    """Settings that were given another value than their default while what they belong to is off."""
    values, defaults = config.flat(), Config().flat()
    strategy = config.kl_strategy
    anchored, moving = needs_anchor(config), strategy.endswith("moving")
    fsdp = config.distributed.enable_fsdp and world_size > 1
    copies = (anchored or config.optimizer.ema_decay > 0) and config.model.device != "cpu"
    rules = [
        (
            "kl_coef kl_min_coef kl_schedule kl_feedback kl_target kl_gain kl_window kl_warmup_updates",
            strategy != "none",
            "kl_weight 0",
        ),
        ("kl_compute_mode", anchored, "no anchor"),
        ("reference_mode_offload", copies, "no anchor and no average on a GPU"),
        ("update_ref_model_step", anchored and moving, "no moving anchor"),
        ("dual_kl_moving_weight dual_kl_step_weight", strategy.startswith("dual"), f"kl_strategy {strategy}"),
        (
            "kl_gain kl_window kl_feedback kl_target",
            strategy == "none" or values["kl_schedule"] == "adaptive",
            f"kl_schedule {values['kl_schedule']}",
        ),
        (
            "kl_coef kl_warmup_updates",
            strategy == "none" or values["kl_schedule"] != "constant",
            "kl_schedule constant",
        ),
        (
            "kl_min_coef",
            strategy == "none" or values["kl_schedule"] == "adaptive",
            f"kl_schedule {values['kl_schedule']}",
        ),
        ("kl_velocity", strategy == "stepwise" or strategy.startswith("dual"), f"kl_strategy {strategy}"),
        (
            "use_moving_KL use_dual_kl",
            values["kl_strategy"] == "flags" and strategy != "none",
            f"kl_strategy {strategy}",
        ),
        ("muon_momentum muon_scope", values["use_muon"], "use_muon false"),
        ("lora_alpha", values["lora_rank"] > 0, "lora_rank 0"),
        ("activation_checkpointing", values["enable_gradient_checkpointing"], "enable_gradient_checkpointing false"),
        ("compile_backend", values["enable_compile"], "enable_compile false"),
        ("enable_fsdp", world_size > 1, "one process"),
        ("reshard_after_forward gradient_sync", fsdp, "no sharding"),
        ("collective_timeout", world_size > 1, "one process"),
        ("gate_tolerance", values["gate_interval"] > 0, "gate_interval 0"),
        ("remote_reward_timeout", bool(values["remote_reward_url"]), "no remote_reward_url"),
        (
            "reward_model reward_config reward_precision reward_checkpoint_mode reward_offload",
            not values["remote_reward_url"],
            "remote_reward_url, whose services have scorers of their own",
        ),
        (
            "reward_precision reward_checkpoint_mode",
            "videoalign" in values["reward_model"] or bool(values["remote_reward_url"]),
            "no videoalign",
        ),
        ("vae_tile_overlap", values["vae_tile_size"] > 0, "vae_tile_size 0"),
        ("batch_guidance", values["cfg_scale"] > 1, f"cfg_scale {values['cfg_scale']:g}"),
        ("keep_every", values["save_total_limit"] > 0, "save_total_limit 0"),
        ("log_num_videos", values["log_video_interval"] > 0 or values["valid_video_csv"], "log_video_interval 0"),
        (
            "validation_steps validation_seed validation_repeats validation_batch_size validation_height "
            "validation_width validation_interval hacking_threshold",
            bool(values["valid_video_csv"]),
            "no valid_video_csv",
        ),
    ]
    for names, is_used, reason in rules:
        given = [name for name in names.split() if values[name] != defaults[name]]
        if given and not is_used:
            yield f"{', '.join(given)}: {reason}"
