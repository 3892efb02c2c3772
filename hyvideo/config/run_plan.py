"""Rules between settings, and the arithmetic of a run: checked and printed before anything is loaded.

Imports neither torch nor a model, so a mistake is told in the first second.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hyvideo.config.input_files import checkpoint_folder_problems, path_problems
from hyvideo.config.ranges import GREATEST, range_problems
from hyvideo.config.settings import REWARD_PRESETS, Config, flat_weights
from hyvideo.data.outside import parse_json, shown, unwritable
from hyvideo.distributed.layout import layout_problem
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import SDE_TYPES, schedule, shifted_levels


@dataclass(frozen=True)
class Plan:
    """How many of what a run makes in one iteration."""

    replicas: int  # data-parallel replicas
    rollouts: int
    groups: int  # prompts
    updates: int
    stochastic_steps: int
    trained_steps: int  # of each rollout, in one update
    forwards_per_rollout: float  # transformer evaluations, a training forward-backward counted as 3, or 4 if recomputed
    ratio_must_be_one: bool
    clip_can_bind: bool


def make_plan(config: Config, world_size: int = 1) -> Plan:
    """The arithmetic of a run on ``world_size`` ranks. Call ``check`` first."""
    rollout, loss = config.rollout, config.loss
    replicas = world_size // config.distributed.sp_size
    rollouts = replicas * rollout.batch_size * rollout.gradient_accumulation_steps
    stochastic = num_stochastic_steps(config)
    trained = max(1, round(stochastic * loss.timestep_fraction)) if stochastic else 0
    branches = 2 if rollout.cfg_scale > 1 else 1
    training = training_forwards(config)
    anchor = trained if needs_anchor(config) else 0
    return Plan(
        replicas=replicas,
        rollouts=rollouts,
        groups=rollouts // rollout.num_generations,
        updates=loss.num_updates_per_rollout,
        stochastic_steps=stochastic,
        trained_steps=trained,
        forwards_per_rollout=branches * (rollout.grpo_sampling_steps + training * trained + anchor),
        ratio_must_be_one=loss.num_updates_per_rollout == 1,
        clip_can_bind=loss.num_updates_per_rollout > 1,
    )


def training_forwards(config: Config) -> int:
    """Forward passes that a training forward-backward costs: three, and one more if whole blocks are recomputed.

    What ``selective`` recomputes is small beside the attention that it keeps.
    """
    distributed = config.distributed
    return 4 if distributed.enable_gradient_checkpointing and distributed.activation_checkpointing == "full" else 3


def num_stochastic_steps(config: Config) -> int:
    """Of a rollout. Raises ValueError for a window that does not fit."""
    rollout = config.rollout
    levels = shifted_levels(rollout.grpo_sampling_steps, rollout.shift)
    steps = schedule(rollout.sde_type, levels, rollout.eta, rollout.last_step)
    number = sum(step.is_stochastic for step in steps)
    window = parse_window(rollout.sde_window, number)
    return window.length if window else number


def needs_anchor(config: Config) -> bool:
    dual_without_position = config.kl_strategy.startswith("dual") and config.trust_region.dual_kl_moving_weight == 0
    return config.kl_strategy not in ("none", "stepwise") and not dual_without_position


def describe(config: Config, plan: Plan) -> str:
    """The arithmetic in words, a line each."""
    loss = config.loss
    ratio = "1 for every rollout" if plan.ratio_must_be_one else "1 in the first update of a round, then free"
    return "\n".join(
        [
            f"replicas               {plan.replicas} (sp_size {config.distributed.sp_size})",
            f"rollouts per iteration {plan.rollouts} = {plan.groups} prompts x {config.rollout.num_generations}",
            f"updates per iteration  {plan.updates}, each on {plan.groups / plan.updates:g} groups",
            f"steps per rollout      {config.rollout.grpo_sampling_steps}, {plan.stochastic_steps} of them stochastic, "
            f"{plan.trained_steps} trained",
            f"exploration            {_exploration(config)}",
            f"forwards per rollout   {plan.forwards_per_rollout:g} transformer evaluations",
            f"trust region           {config.kl_strategy}, {config.trust_region.kl_schedule} coefficient",
            f"ratios                 {ratio}",
            f"clip range             {loss.clip_range:g}, can bind: {'yes' if plan.clip_can_bind else 'no'}",
        ]
    )


def _exploration(config: Config) -> str:
    rollout = config.rollout
    levels = shifted_levels(rollout.grpo_sampling_steps, rollout.shift)
    steps = schedule(rollout.sde_type, levels, rollout.eta, rollout.last_step)
    variances = [step.std**2 for step in steps if step.is_stochastic]
    matched = f", matched with {rollout.match_noise}" if rollout.match_noise else ""
    told = f"{rollout.sde_type} at eta {rollout.eta:.4g}{matched}: a variance of {sum(variances):.4g} over the steps"
    window = parse_window(rollout.sde_window, len(variances))
    if window is None:
        return told
    firsts = [window.start] if window.kind == "fixed" else range(len(variances) - window.length + 1)
    inside = [sum(variances[first : first + window.length]) for first in firsts]
    ends = dict.fromkeys(f"{end:.4g}" for end in (min(inside), max(inside)))
    return f"{told} without a window, of {' to '.join(ends)} in sde_window {rollout.sde_window}"


def check(config: Config, world_size: int = 1) -> None:
    """Raises ValueError that lists every rule the settings break."""
    problems = [*range_problems(config)]
    if not problems:  # what follows calculates with the numbers
        method = [*_match_problems(config), *_method_problems(config)]
        batches = [*batch_problems(config, world_size), *_watchdog_problems(config, world_size)]
        problems = [*batches, *method, *path_problems(config)]
    if problems:
        raise ValueError("\n".join(problems))


def check_sampling(config: Config, *, output: Path) -> None:
    """As `check`, of what sampling alone depends on; ``output`` is the folder for its videos."""
    problems = list(range_problems(config))
    if config.rollout.sde_type not in SDE_TYPES:
        problems.append(f"sde_type must be one of {', '.join(SDE_TYPES)}, got {config.rollout.sde_type!r}")
    if not problems:
        problems.extend(_match_problems(config))
    problems.extend(checkpoint_folder_problems(config))
    if problem := unwritable(output):
        problems.append(f"the output must be a folder that can be written to, got {shown(output)}: {problem}")
    if problems:
        raise ValueError("\n".join(problems))


def batch_problems(config: Config, world_size: int) -> Iterator[str]:
    """What keeps the rollouts of an iteration from being whole groups, dealt evenly to the replicas."""
    batch, group = config.rollout.batch_size, config.rollout.num_generations
    sp_size = config.distributed.sp_size
    if problem := layout_problem(world_size, sp_size, config.distributed.dp_replicate):
        yield problem
        return
    replicas = world_size // sp_size
    if (batch * replicas) % group:
        yield (
            f"the rollouts of a batch must be whole groups: batch_size {batch} x {replicas} replicas = "
            f"{batch * replicas} is not a multiple of num_generations {group}"
        )
    elif batch % group and group % batch:
        yield (
            f"a replica must hold whole groups, or a group whole replicas: of batch_size {batch} and num_generations "
            f"{group} one must be a multiple of the other"
        )
    else:
        groups = batch * replicas * config.rollout.gradient_accumulation_steps // group
        updates = config.loss.num_updates_per_rollout
        if groups % updates:
            yield f"num_updates_per_rollout must divide the {groups} groups of an iteration, got {updates}"
    if group < 2:
        yield f"num_generations must be at least 2, since advantages compare the rollouts of a group; got {group}"


def _watchdog_problems(config: Config, world_size: int) -> Iterator[str]:
    """A hang must be told before it ends the run; the report may come a tenth late."""
    seconds, timeout = config.distributed.watchdog_seconds, config.distributed.collective_timeout
    if world_size > 1 and seconds > 0.9 * timeout:
        yield (
            f"watchdog_seconds must be at most 0.9 of collective_timeout, which ends a run that hangs, got {seconds:g} "
            f"and {timeout:g}; lower it, or set 0 for no report"
        )


def _match_problems(config: Config) -> Iterator[str]:
    if config.rollout.match_noise and config.rollout.sde_window:
        yield (
            "match_noise chooses eta for the noise of all steps, and sde_window leaves noise on some: set eta, and "
            "leave out match_noise"
        )
    elif config.rollout.match_noise:
        yield from _problem_of(lambda: config.matched_eta)


def _method_problems(config: Config) -> Iterator[str]:
    settings, rollout = config.trust_region, config.rollout
    if settings.kl_strategy not in ("flags", "none") and settings.kl_weight == 0:
        yield f"kl_strategy {settings.kl_strategy} needs kl_weight > 0, got 0; set kl_weight or take kl_strategy none"
    if settings.kl_strategy == "none" and settings.kl_weight > 0:
        yield f"kl_strategy none means kl_weight 0, got kl_weight {settings.kl_weight}; set it to 0"
    if config.kl_strategy != "none" and not settings.kl_min_coef <= settings.kl_coef <= settings.kl_weight:
        yield (
            f"need kl_min_coef <= kl_coef <= kl_weight, got {settings.kl_min_coef:g}, {settings.kl_coef:g} and "
            f"{settings.kl_weight:g}"
        )
    updates = config.loss.num_updates_per_rollout
    if needs_anchor(config) and config.kl_strategy.endswith("moving") and settings.update_ref_model_step % updates:
        yield (
            "the anchor is refreshed between rounds: update_ref_model_step must be a multiple of "
            f"num_updates_per_rollout, got {settings.update_ref_model_step} and {updates}"
        )
    if settings.kl_target is not None and not settings.kl_target > 0:
        yield f"kl_target must be positive, got {settings.kl_target}"
    problem = next(_problem_of(lambda: num_stochastic_steps(config)), None)
    if problem:
        yield problem
    elif num_stochastic_steps(config) == 0:
        yield (
            f"the sampler must have at least one stochastic step, or there is nothing to train: sde_type "
            f"{rollout.sde_type} with eta {rollout.eta}, {rollout.grpo_sampling_steps} steps and last_step "
            f"{rollout.last_step} has none; raise eta or the number of steps"
        )
    unknown = set(config.record.report_to) - {"tensorboard", "wandb", "none"}
    if unknown:
        yield f"report_to takes tensorboard, wandb or none, got {', '.join(sorted(unknown))}"
    if "wandb" in config.record.report_to:
        from hyvideo.records.trackers import import_wandb

        yield from _problem_of(import_wandb)
    if "tensorboard" in config.record.report_to and importlib.util.find_spec("tensorboard") is None:
        yield (
            'report_to has "tensorboard", which is not installed; pip install tensorboard or take it out of report_to'
        )
    yield from _reward_problems(config)
    yield from _optimizer_problems(config)
    yield from _hacking_problems(config)


def _reward_problems(config: Config) -> Iterator[str]:
    from hyvideo.models.reward_models.rewards import SCORERS

    reward = config.reward
    if unknown := [name for name in reward.reward_model if name not in SCORERS]:
        yield f"reward_model must be of {', '.join(SCORERS)}, got {', '.join(map(repr, unknown))}"
    if len(set(reward.reward_model)) < len(reward.reward_model):
        yield f"reward_model must name each scorer once, got {', '.join(reward.reward_model)}"
    yield from _problem_of(lambda: config.reward_options)
    text = reward.reward_weights
    if text in REWARD_PRESETS:
        return
    try:
        weights = flat_weights(parse_json(text))
    except (ValueError, AttributeError):  # no JSON, or no object
        weights = None
    is_number = isinstance(weights, dict) and all(
        isinstance(w, (int, float)) and not isinstance(w, bool) and abs(w) <= GREATEST for w in weights.values()
    )
    if not is_number or not weights or not any(weights.values()):
        yield (
            f"reward_weights must be {', '.join(REWARD_PRESETS)} or a JSON object of numbers, one for each dimension "
            f"such as VQ, MQ and TA, with one not 0, got {shown(text)}"
        )


def _hacking_problems(config: Config) -> Iterator[str]:
    record = config.record
    action, validated, saved = record.on_reward_hacking, record.validation_interval, record.save_interval
    if action != "warn" and not config.data.valid_video_csv:
        yield (
            f"on_reward_hacking {action} needs validations, which alone show it: name a valid_video_csv, or take warn"
        )
    if action != "rollback":
        return
    if validated % saved:
        yield (
            "on_reward_hacking rollback goes back to the checkpoint of a validation: save_interval must divide "
            f"validation_interval, got {saved} and {validated}"
        )
    elif 0 < record.save_total_limit < validated // saved:
        yield (
            "on_reward_hacking rollback needs the checkpoint of the last validation: save_total_limit must be 0 or at "
            f"least validation_interval / save_interval = {validated // saved}, got {record.save_total_limit}"
        )


def _problem_of(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ValueError as error:
        yield str(error)


def _optimizer_problems(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.use_8bit_adam and config.record.resume_from_checkpoint:
        yield "use_8bit_adam cannot go on from a checkpoint: its state would come back in full precision; set it false"
    settings = config.trust_region
    if settings.reference_mode_offload and settings.kl_compute_mode == "training_phase" and needs_anchor(config):
        yield (
            "reference_mode_offload with kl_compute_mode training_phase would move all weights to the CPU and back "
            "twice in every pass; take kl_compute_mode rollout_phase, or leave out the offload"
        )
    if optimizer.use_8bit_adam and importlib.util.find_spec("torchao") is None:
        yield "use_8bit_adam needs torchao, which is not installed: pip install torchao"
    if config.model.master_weight_type == "bf16" and not optimizer.lora_rank:  # a LoRA is always in float32
        if config.model.dtype == "fp32":
            yield "master_weight_type bf16 needs dtype bf16, got fp32: weights in bf16 cannot compute in fp32"
        if optimizer.ema_decay:
            yield (
                f"ema_decay needs master_weight_type fp32, got {optimizer.ema_decay:g} and bf16: in bf16 a step of the "
                "average rounds to nothing"
            )
    if optimizer.lora_target_modules and not optimizer.lora_rank:
        yield "lora_target_modules needs a lora_rank above 0, got 0"
    try:
        re.compile(optimizer.lora_target_modules)
    except re.error as error:
        yield f"lora_target_modules must be a regular expression, got {shown(optimizer.lora_target_modules)}: {error}"
    if config.distributed.dp_replicate > 1 and not config.distributed.enable_fsdp:
        yield (
            f"dp_replicate {config.distributed.dp_replicate} needs enable_fsdp: without it every rank has the whole "
            "model"
        )
