"""Rules that settings must satisfy: functions that yield a message for every violation, without
importing torch.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyvideo.config import machine_rules as machine
from hyvideo.config.all_settings import MAX_STEPS, RewardSettings, RolloutSettings
from hyvideo.config.command_line import reward_options
from hyvideo.config.config import REWARD_PRESETS, TRAITS, Config, eta_of, flat_weights
from hyvideo.config.machine_rules import Problems, problem_of
from hyvideo.config.objectives import OBJECTIVES, objective_class, traits_of
from hyvideo.config.reference_flags import REFERENCE_SCORERS
from hyvideo.config.run_inputs import RunInputs
from hyvideo.config.run_plan import (
    branches_of_steps,
    levels_of,
    num_stochastic_steps,
    parse_interval,
    stochastic_transitions,
    validation_transitions,
)
from hyvideo.data.files import parse_json
from hyvideo.data.prompts import check_prompt
from hyvideo.data.text import nearest, quote
from hyvideo.models.versions import version_defaults
from hyvideo.rewards.rewards import (
    MAX_SCORE,
    OVERALL,
    RESERVED_NAMES,
    SCORERS,
    SERVICE_ATTEMPTS,
    has_gradient,
    scorer_class,
)
from hyvideo.schedulers.transitions import describe_levels, parse_sigmas, sampler_of


def check(config: Config, world_size: int = 1, *, on_this_machine: bool = True) -> RunInputs:
    """Return the inputs of a run, as far as the rules have read them.

    Raises ValueError with every rule that the settings violate and, if requested, what this machine
    lacks.
    """
    check_ranges(config.flat())  # the other rules compute with these numbers
    inputs = RunInputs(config, world_size)
    _raise(
        batch_problems(config, world_size),
        process_problems(config, world_size),
        sampler_problems(config),
        trust_region_problems(config),
        objective_problems(config),
        reward_gradient_problems(config),
        pair_problems(config),
        reward_problems(config.reward),
        weight_problems(config),
        record_problems(config),
        data_problems(inputs),
        machine.machine_problems(inputs) if on_this_machine else (),
    )
    return inputs


def check_sampling(config: Config, *, output: Path, is_stochastic: bool = True) -> None:
    """Raise ValueError as `check` does, for sampling ``validation_steps`` steps into ``output``."""
    ranges = list(range_problems(config.flat()))
    as_sampled = config.with_settings(grpo_sampling_steps=config.record.validation_steps).rollout
    _raise(
        ranges,
        problem_of(lambda: levels_of(as_sampled)) if not ranges else (),
        noise_can_be_matched(config.rollout) if is_stochastic and not ranges else (),
        problem_of(lambda: stochastic_transitions(as_sampled))
        if is_stochastic and not ranges
        else (),
        machine.checkpoints_exist(config.model.pretrained_model_root),
        machine.folders_can_be_written("the output", output),
    )


def check_evaluation(config: Config, *, output: Path, has_model: bool) -> None:
    """Raise ValueError as `check` does, for an evaluation of a model or, if not ``has_model``, of
    videos.
    """
    _raise(
        range_problems(config.flat()),
        reward_problems(config.reward),
        machine.checkpoints_exist(config.model.pretrained_model_root) if has_model else (),
        machine.folders_can_be_written("the output", output),
    )


def check_ranges(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for values that are invalid regardless of the other settings."""
    _raise(range_problems(settings))


def _raise(*problems: Iterable[str]) -> None:
    # without repetitions
    message = "\n".join(dict.fromkeys(itertools.chain.from_iterable(problems)))
    if message:
        raise ValueError(message)


def range_problems(values: Mapping[str, Any]) -> Problems:
    """Yield a message for each value that is invalid regardless of the other settings."""
    for name, value in values.items():
        if problem := TRAITS[name].range_problem(value):
            yield f"{name} {problem}, got {value}"
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not _is_utf8(text):
                yield f"{name} must be text in UTF-8, got {quote(text)}; rename the file or folder"
    if ".py:" not in values["sde_type"]:  # a custom sampler is loaded only where it is used
        yield from problem_of(lambda: sampler_of(values["sde_type"]))
    height, width = values["validation_height"], values["validation_width"]
    if (height == 0) != (width == 0):
        yield (
            f"validation_height and validation_width must both be set or both be 0, got {height} "
            f"and {width}"
        )
    yield from problem_of(lambda: parse_sigmas(values["sigmas"]))
    yield from problem_of(lambda: parse_interval(values["guidance_interval"]))
    if negative_prompt := values["negative_prompt"]:
        yield from problem_of(lambda: check_prompt(negative_prompt, "as negative_prompt"))
    version = values["transformer_version"]
    if "/" in version or "\\" in version or version in (".", ".."):
        yield (
            "transformer_version must be the name of a folder in transformer/, not a path, got "
            f"{quote(version)}"
        )


def _is_utf8(text: str) -> bool:
    """Return whether text can be written; the bytes of an argument that are not UTF-8 become lone
    surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def layout_problems(world_size: int, sp_size: int, dp_replicate: int = 1) -> Problems:
    """Yield why this layout of ranks is not possible, and the possible values."""
    start = f"start {sp_size} with torchrun --nproc_per_node={sp_size}"
    if world_size % sp_size:
        yield (
            f"sp_size must divide the number of processes, got sp_size {sp_size} and WORLD_SIZE "
            f"{world_size}; "
            f"{start if world_size == 1 else f'possible values: {_divisors(world_size)}'}"
        )
    elif world_size % (dp_replicate * sp_size):
        yield (
            f"dp_replicate must divide the {world_size // sp_size} data-parallel replicas "
            f"({world_size} processes, sp_size {sp_size}), got {dp_replicate}; possible values: "
            f"{_divisors(world_size // sp_size)}"
        )


def head_problems(sp_size: int, num_heads: int) -> Problems:
    if sp_size > num_heads:
        yield (
            f"sp_size must be at most the {num_heads} attention heads of the transformer, got "
            f"{sp_size}; {_divisors(num_heads)} give every rank the same number of heads"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def batch_problems(config: Config, world_size: int) -> Problems:
    """Yield why the rollouts of an iteration do not form whole groups that are evenly distributed
    over the replicas.
    """
    rollout = config.rollout
    distributed = config.distributed
    num_updates = config.loss.num_updates_per_rollout
    problems = list(layout_problems(world_size, distributed.sp_size, distributed.dp_replicate))
    if problems:
        yield from problems
        return
    batch = rollout.batch_size
    group = rollout.num_generations
    replicas = world_size // distributed.sp_size
    if (batch * replicas) % group:
        # the next larger batch_size that also satisfies the rule below
        larger_batch = next(
            b
            for b in itertools.count(batch)
            if (b * replicas) % group == 0 and 0 in (b % group, group % b)
        )
        yield (
            f"a batch must consist of whole groups: batch_size {batch} x replicas {replicas} = "
            f"{batch * replicas} is not a multiple of num_generations {group}; use batch_size "
            f"{larger_batch}, or change num_generations"
        )
    elif batch % group and group % batch:
        yield (
            "batch_size must be a multiple or a divisor of num_generations, so that every replica "
            f"samples whole groups or an equal share of one, got batch_size {batch} and "
            f"num_generations {group}; change one of them"
        )
    else:
        groups = batch * replicas * rollout.gradient_accumulation_steps // group
        if groups % num_updates:
            yield (
                f"num_updates_per_rollout must divide the {groups} groups of an iteration, because "
                f"every update trains equally many whole groups, got {num_updates}; possible "
                f"values: {_divisors(groups)}"
            )
    if group < 2 and config.loss.objective != "distill":
        yield (
            "num_generations must be at least 2, because advantages compare the rollouts of a "
            f"group, got {group}; raise num_generations"
        )


def planned_world_size(config: Config, words: str) -> int:
    """Return the number of processes that the batches of a run need.

    The number in the name of a config comes first, such as 64 in ``configs/..._64gpu.yaml``, which
    is part of ``words``; then 1, 8 and the numbers between them. Returns 1 if none of them fits.
    """
    named = [int(number) for number in re.findall(r"([1-9]\d{0,3})gpu", words)]
    for number in (*named, 1, 8, *range(2, 8)):
        if not list(batch_problems(config, number)):
            return number
    return 1


def process_problems(config: Config, world_size: int) -> Problems:
    """Yield problems of replicas without sharding, and of watchdog or reward timeouts above the
    collective timeout.
    """
    distributed, reward = config.distributed, config.reward
    if distributed.dp_replicate > 1 and not distributed.enable_fsdp:
        yield (
            "dp_replicate needs enable_fsdp true, because without sharding every rank has a copy, "
            f"got {distributed.dp_replicate} and false; set enable_fsdp true or dp_replicate 1"
        )
    report = distributed.watchdog_seconds
    timeout = distributed.collective_timeout
    if world_size > 1 and report > 0.9 * timeout:
        yield (
            "watchdog_seconds must be at most 0.9 of collective_timeout, which ends a run that "
            f"hangs before the report is printed, got {report:g} and {timeout:g}; lower "
            "watchdog_seconds, or set it to 0 to disable the report"
        )
    number = len(reward.remote_reward_url.split(",")) if reward.remote_reward_url else 0
    seconds = SERVICE_ATTEMPTS * number * reward.remote_reward_timeout
    if world_size > 1 and seconds > distributed.reward_deadline:
        yield (
            f"{SERVICE_ATTEMPTS} attempts at {number} reward services must take at most 0.8 of "
            "collective_timeout, because the other ranks wait for the rewards and would end the "
            f"run, got {seconds:g} s and {distributed.reward_deadline:g} s; lower "
            "remote_reward_timeout or raise collective_timeout"
        )


def noise_can_be_matched(rollout: RolloutSettings) -> Problems:
    if rollout.match_noise:
        yield from problem_of(lambda: eta_of(rollout))


def sampler_problems(config: Config) -> Problems:
    """Yield an invalid eta, window, noise to match or custom sampler, and a guidance interval
    without steps.
    """
    rollout = config.rollout
    scale = max(rollout.cfg_scale, config.anchor_cfg_scale)
    problems = list(problem_of(lambda: levels_of(rollout)))
    if problems:
        yield from problems
        return
    yield from noise_can_be_matched(rollout)
    yield from problem_of(lambda: stochastic_transitions(rollout))
    if config.validation_eta > 0 and config.data.valid_video_csv:
        for problem in problem_of(lambda: validation_transitions(config)):
            yield f"validation_eta {config.validation_eta:g} cannot be used: {problem}"
    if scale > 1 and max(branches_of_steps(rollout, scale)) == 1:
        yield (
            "guidance_interval must contain at least one step of the schedule, because no video "
            f"would be guided, got {rollout.guidance_interval} and "
            f"{describe_levels(rollout.grpo_sampling_steps, rollout.shift, rollout.sigmas)}; widen "
            "the interval"
        )


def objective_problems(config: Config) -> Problems:
    """Yield an invalid objective, a rollout without steps to train, and what noise levels cannot be
    trained with.
    """
    rollout = config.rollout
    version = version_defaults(config.model.transformer_version)
    name = config.loss.objective
    problems = list(problem_of(lambda: objective_class(name))) if name not in OBJECTIVES else []
    if problems:
        yield from problems
        return
    if name == "distill":
        yield from distill_problems(config)
        return
    if config.trust_region.anchor_substeps > 1:
        yield (
            "anchor_substeps above 1 needs objective distill, got "
            f"{config.trust_region.anchor_substeps} and {name}; remove anchor_substeps or set "
            "objective distill"
        )
    if traits_of(name).trains == "steps":
        yield from problem_of(lambda: some_step_is_stochastic(rollout))
        return
    if version.reads_ends:
        yield from flow_map_problems(config, version.name)
    elif version.kind == "step_distilled":
        yield (
            f"objective {name} trains at any noise level, but transformer_version {version.name} "
            "is step-distilled and only covers the levels of its few steps; use another version or "
            "objective grpo"
        )
    if rollout.sde_window:
        yield (
            f"sde_window cannot be used with objective {name}, which trains noise levels and not "
            f"the steps of a rollout, got {quote(rollout.sde_window)}; remove sde_window"
        )
    if rollout.use_same_noise and rollout.eta == 0:
        yield (
            "use_same_noise needs eta above 0, because with eta 0 all rollouts of a group are "
            "identical, got 0; remove use_same_noise or raise eta"
        )


def flow_map_problems(config: Config, version: str) -> Problems:
    """Yield settings with which noise levels of a flow map cannot be trained."""
    name = config.loss.objective
    if name in ("dpo", "draft"):
        yield (
            f"objective {name} needs a model of velocities, but transformer_version {version} is a "
            "flow map, which predicts the mean velocity of a step; use objective nft or grpo, or "
            "another version"
        )
    elif config.loss.reward_gradient_weight > 0:
        yield (
            "reward_gradient_weight needs a model of velocities, but transformer_version "
            f"{version} is a flow map, which predicts the mean velocity of a step, got "
            f"{config.loss.reward_gradient_weight:g}; set reward_gradient_weight 0"
        )
    if config.rollout.cfg_scale > 1:
        yield (
            f"objective {name} needs cfg_scale 1 with the flow map {version}, because guided mean "
            "velocities are not the mean velocities of the guided model, got "
            f"{config.rollout.cfg_scale:g}; set cfg_scale 1"
        )


def reward_gradient_problems(config: Config) -> Problems:
    """Yield what a reward gradient cannot be computed with, and settings of objective draft that
    lack a term.
    """
    loss = config.loss
    reward = config.reward
    strategy = config.kl_strategy
    if loss.objective == "draft" and loss.reward_gradient_weight == 0:
        yield (
            "objective draft needs a reward_gradient_weight above 0, got 0; set "
            "reward_gradient_weight, such as 0.05"
        )
    if loss.objective == "draft" and config.measures_velocity:
        yield (
            f"objective draft has no KL to the rollout policy, got kl_strategy {strategy}; set "
            "kl_strategy fixed, moving, or none with kl_weight 0"
        )
    if loss.objective == "draft" and strategy == "none" and loss.nft_levels:
        yield (
            "objective draft measures the KL at the noise levels of nft_levels, and kl_strategy "
            f"none has no KL, got nft_levels {loss.nft_levels}; set nft_levels 0 or a kl_strategy"
        )
    if loss.objective != "draft" and loss.nft_levels == 0:
        yield (
            "nft_levels must be at least 1, because the objective trains no other level, got 0; "
            "set nft_levels 4"
        )
    if loss.reward_gradient_weight == 0:
        return
    with suppress(ValueError):  # `objective_problems` reports it
        if traits_of(loss.objective).trains != "levels":
            yield (
                "reward_gradient_weight needs an objective on noise levels, nft or draft, got "
                f"objective {loss.objective}; set objective nft or draft, or "
                "reward_gradient_weight 0"
            )
    if reward.remote_reward_url:
        yield (
            "reward_gradient_weight needs scorers in this process, because a reward service "
            "returns numbers without a gradient, got remote_reward_url "
            f"{reward.remote_reward_url}; remove remote_reward_url or set reward_gradient_weight 0"
        )
    if reward.reward_video == "file":
        yield (
            "reward_gradient_weight needs reward_video memory, because a video file has no "
            "gradient, got file; set reward_video memory"
        )
    known = [name for name in reward.reward_model if name in SCORERS or ":" in name]
    differentiable = ", ".join(name for name, entry in SCORERS.items() if entry.has_gradient)
    for name in known:
        with suppress(ValueError):  # `reward_problems` reports it
            if not has_gradient(name):
                yield (
                    "reward_gradient_weight needs scorers with a gradient, got reward_model "
                    f"{name}, which has no score_with_gradient; use {differentiable} or a class "
                    f"with that method, or train {name} with objective nft or grpo and "
                    "reward_gradient_weight 0"
                )


def pair_problems(config: Config) -> Problems:
    """Yield what an objective on rated pairs cannot be used with, and pairs for another
    objective.
    """
    name = config.loss.objective
    if name not in OBJECTIVES and any(problem_of(lambda: objective_class(name))):
        return  # `objective_problems` reports it
    data = config.data
    if not config.uses_pairs:
        if data.pairs_csv or data.pair_weights:
            yield (
                "pairs_csv and pair_weights need objective dpo, which trains on rated pairs, got "
                f"objective {name}; set objective dpo or remove them"
            )
        return
    rollout = config.rollout
    if not data.pairs_csv:
        yield (
            f"objective {name} needs rated pairs of videos, got no pairs_csv; name a CSV file "
            "(docs/ratings.md)"
        )
    yield from pair_weights_are_numbers(data.pair_weights)
    yield from pair_count_problems(config)
    for setting, scale in {
        "cfg_scale": rollout.cfg_scale,
        "anchor_cfg_scale": config.anchor_cfg_scale,
    }.items():
        if scale > 1:
            yield (
                f"objective {name} trains the model without guidance, got {setting} {scale:g}; set "
                f"{setting} 1, and validation_cfg_scale to the guidance of your videos"
            )
    if config.kl_strategy != "fixed":
        yield (
            f"objective {name} needs kl_strategy fixed and a kl_weight above 0, because without "
            "the KL to the base model the winners' videos also get less likely, got kl_strategy "
            f"{config.trust_region.kl_strategy} and kl_weight {config.trust_region.kl_weight:g}; "
            "set kl_strategy fixed, kl_schedule constant and kl_weight 1"
        )
    if config.reward.ignore_rewards:
        yield (
            f"ignore_rewards cannot be used with objective {name}, which has no rewards: the KL "
            "alone would train nothing, got true; remove it"
        )


def pair_count_problems(config: Config) -> Problems:
    """Yield counts that do not fit pairs of videos."""
    name, rollout = config.loss.objective, config.rollout
    needed = {
        "num_generations": (rollout.num_generations, 2, "a group is a winner and a loser"),
        "num_updates_per_rollout": (
            config.loss.num_updates_per_rollout,
            1,
            "all pairs of an iteration are one update",
        ),
        "anchor_fraction": (
            config.trust_region.anchor_fraction,
            1.0,
            "the loss needs the base model at every level",
        ),
    }
    for setting, (value, only, reason) in needed.items():
        if value != only:
            yield (
                f"objective {name} needs {setting} {only:g}, because {reason}, got {value:g}; set "
                f"{setting} {only:g}"
            )
    if rollout.batch_size % 2:
        yield (
            f"objective {name} needs an even batch_size, because both videos of a pair are on one "
            f"replica, got {rollout.batch_size}; use {rollout.batch_size + 1}"
        )
    size = config.rows_per_pass
    if size > 1 and size % 2:
        yield (
            f"objective {name} needs whole pairs, or one video, in a forward pass, got "
            f"mini_batch_size_per_update {size}; use {size + 1} or 1"
        )


def pair_weights_are_numbers(text: str) -> Problems:
    """Yield weights of rated dimensions that are not a JSON object of finite numbers from 0, not
    all 0.
    """
    if not text:
        return
    try:
        weights = parse_json(text)
    except ValueError:
        weights = None
    values = list(weights.values()) if isinstance(weights, dict) else []
    if not all(
        type(value) in (int, float) and 0 <= value <= MAX_SCORE for value in values
    ) or not any(values):
        yield (
            "pair_weights must be a JSON object with a number from 0 for each dimension, such as "
            '{"Overall": 1}, at '
            f"least one of them above 0, got {quote(text)}"
        )


def distill_problems(config: Config) -> Problems:
    """Yield settings with which a student cannot follow its teacher."""
    rollout = config.rollout
    num_levels = rollout.grpo_sampling_steps * config.trust_region.anchor_substeps
    if rollout.eta != 0:
        yield (
            "objective distill needs eta 0, because the student follows the ODE of its teacher, "
            f"got {rollout.eta:g}; set eta 0"
        )
    if rollout.cfg_scale > 1:
        yield (
            "objective distill needs cfg_scale 1, because the student learns the guidance of its "
            f"teacher, got {rollout.cfg_scale:g}; set cfg_scale 1 and the guidance of the teacher "
            "as anchor_cfg_scale"
        )
    if rollout.sde_window:
        yield (
            "objective distill cannot use sde_window, because it adds no noise, got "
            f"{quote(rollout.sde_window)}"
        )
    if config.kl_strategy != "fixed":
        yield (
            "objective distill needs kl_strategy fixed and a kl_weight above 0, which keep the "
            f"teacher, got {config.trust_region.kl_strategy} and "
            f"{config.trust_region.kl_weight:g}; set both"
        )
    if config.loss.num_updates_per_rollout != 1:
        yield (
            "objective distill needs num_updates_per_rollout 1, because it trains at the latents "
            f"of the current student, got {config.loss.num_updates_per_rollout}; set 1, and fewer "
            "rollouts per iteration"
        )
    if config.reward.ignore_rewards:
        yield (
            "ignore_rewards has no effect with objective distill, which scores no rollout; remove "
            "ignore_rewards"
        )
    if num_levels > MAX_STEPS:
        yield (
            "the steps of the teacher, grpo_sampling_steps times anchor_substeps, must be at most "
            f"{MAX_STEPS}, got {num_levels}; lower anchor_substeps"
        )


def some_step_is_stochastic(rollout: RolloutSettings) -> None:
    """Raise ValueError if no step can be trained."""
    if num_stochastic_steps(rollout) == 0:
        raise ValueError(
            "the sampler must have at least one stochastic step to train, got none with sde_type "
            f"{rollout.sde_type}, eta {rollout.eta}, {rollout.grpo_sampling_steps} steps and "
            f"last_step {rollout.last_step}; raise eta or grpo_sampling_steps"
        )


def trust_region_problems(config: Config) -> Problems:
    """Yield KL terms, coefficients and anchors that contradict each other."""
    trust = config.trust_region
    strategy = config.kl_strategy
    version = config.model.transformer_version
    if config.reward.ignore_rewards and strategy == "none":
        yield (
            "ignore_rewards trains on the KL terms alone, got kl_strategy none, which leaves "
            "nothing to train on; set kl_weight and a strategy"
        )
    if trust.kl_strategy == "none" and trust.kl_weight > 0:
        yield (
            f"kl_strategy none needs kl_weight 0, got {trust.kl_weight}; set kl_weight 0 or choose "
            "a strategy"
        )
    if strategy != "none" and not trust.kl_min_coef <= trust.kl_coef <= trust.kl_weight:
        yield (
            "the coefficients must satisfy kl_min_coef <= kl_coef <= kl_weight, because a schedule "
            f"starts at kl_coef and stays between the other two, got {trust.kl_min_coef:g}, "
            f"{trust.kl_coef:g} and {trust.kl_weight:g}; lower kl_min_coef or kl_coef, or raise "
            "kl_weight"
        )
    if (trust.anchor_cfg_scale or 0) > 1 and version_defaults(version).kind.endswith("distilled"):
        yield (
            "anchor_cfg_scale must be 1 if guidance is distilled into the weights, got "
            f"{trust.anchor_cfg_scale:g} with transformer_version {version}; set anchor_cfg_scale 1"
        )
    if config.anchor_has_own_guidance and strategy.endswith("moving"):
        yield (
            "anchor_cfg_scale needs a fixed anchor, because each refresh would guide what was "
            f"learned from guidance, got {config.anchor_cfg_scale:g} with kl_strategy {strategy}; "
            "set kl_strategy fixed or dual_fixed, or anchor_cfg_scale to the cfg_scale of the "
            "policy"
        )
    if trust.anchor_path and strategy not in ("fixed", "dual_fixed"):
        yield (
            "anchor_path needs a fixed anchor, because a refresh would replace it by the policy, "
            f"got kl_strategy {strategy}; set kl_strategy fixed or dual_fixed, or remove "
            "anchor_path"
        )
    num_updates = config.loss.num_updates_per_rollout
    if config.anchor_moves and trust.update_ref_model_step % num_updates:
        yield (
            "update_ref_model_step must be a multiple of num_updates_per_rollout, because the "
            f"anchor is refreshed between iterations, got {trust.update_ref_model_step} and "
            f"{num_updates}; use "
            f"{math.ceil(trust.update_ref_model_step / num_updates) * num_updates}"
        )


def reward_problems(reward: RewardSettings) -> Problems:
    """Yield unknown scorers and invalid options or weights."""
    if not reward.reward_model:
        yield (
            f"reward_model must name at least one of {', '.join(SCORERS)} or FILE.py:NAME, got none"
        )
    for setting in ("reward_model", "held_out_reward_model"):
        if unknown := [
            name for name in getattr(reward, setting) if name not in SCORERS and ":" not in name
        ]:
            message = f"{setting} must be one of {', '.join(SCORERS)} or FILE.py:NAME"
            message += f", got {', '.join(map(quote, unknown))}"
            hint = nearest(unknown[0], SCORERS)
            yield f"{message}; {hint}" if hint else message
    named = [*reward.reward_model, *reward.held_out_reward_model]
    if len(set(named)) < len(named):
        yield (
            "reward_model and held_out_reward_model must name each scorer once, because a scorer "
            "that rewards is not held out, and a second copy would count twice, got "
            f"{', '.join(named)}; remove the repeated one"
        )
    for name in reward.loaded_scorers:
        if ":" in name:
            yield from problem_of(lambda name=name: scorer_class(name))
    if reward.score_between_stages and not (reward.reward_offload or reward.remote_reward_url):
        yield (
            "score_between_stages needs reward_offload true, which takes the scorers off the GPU "
            "during the other stages, got false; set reward_offload true or remove "
            "score_between_stages"
        )
    yield from problem_of(lambda: reward_options(reward))
    yield from weights_are_numbers(reward)


def weights_are_numbers(reward: RewardSettings) -> Problems:
    """Yield reward weights that are neither a preset nor a JSON object of finite numbers, not all
    0.
    """
    text = reward.reward_weights
    if text in REWARD_PRESETS:
        return
    try:
        given = parse_json(text)
        weights = flat_weights(given)
    except (ValueError, AttributeError):  # invalid JSON, or not an object
        given, weights = {}, {}
    are_numbers = all(
        type(weight) in (int, float) and abs(weight) <= MAX_SCORE for weight in weights.values()
    )
    if not are_numbers or not any(weights.values()):
        yield (
            f"reward_weights must be {', '.join(REWARD_PRESETS)} or a JSON object with a number "
            f"for each dimension, such as VQ, MQ and TA, of at most {MAX_SCORE:g} and at least one "
            f"of them not 0, got {quote(text)}"
        )
    by_scorer = [
        value if isinstance(value, dict) else {name: value} for name, value in given.items()
    ]
    names = {dimension for dimensions in by_scorer for dimension in dimensions}
    taken = names & {*RESERVED_NAMES, OVERALL}
    if taken:
        yield (
            f"reward_weights must not use the names {', '.join(sorted(taken))}, which are reserved "
            "for records; rename the dimensions of your scorer"
        )
    scorers = [
        REFERENCE_SCORERS.get(name, name)
        for name, value in given.items()
        if isinstance(value, dict)
    ]
    unknown = [name for name in scorers if name not in reward.reward_model]
    if unknown:
        yield (
            "reward_weights must name the scorers of reward_model, "
            f"{', '.join(reward.reward_model)}, got {', '.join(map(quote, unknown))}; remove them "
            "or add them to reward_model"
        )


def record_problems(config: Config) -> Problems:
    record = config.record
    if unknown := set(record.report_to) - {*machine.REPORTS, "none"}:
        yield (
            f"report_to must be {', '.join(machine.REPORTS)} or none, got "
            f"{', '.join(sorted(unknown))}"
        )
    if record.on_reward_hacking == "warn":
        return
    if not config.data.valid_video_csv:
        yield (
            f"on_reward_hacking {record.on_reward_hacking} needs validation prompts, because it "
            "compares validations, got none; set valid_video_csv or use on_reward_hacking warn"
        )
    elif not record.validate_at_step0 and not record.resume_from_checkpoint:
        yield (
            f"on_reward_hacking {record.on_reward_hacking} needs a validation of the base model, "
            "with which it compares the others, got validate_at_step0 false; set validate_at_step0 "
            "true or use on_reward_hacking warn"
        )


def weight_problems(config: Config) -> Problems:
    """Yield combinations of precisions, LoRA, EMA and sharding that cannot be trained."""
    model = config.model
    optimizer = config.optimizer
    # a LoRA is always in float32
    if model.master_weight_type == "bf16" and not optimizer.lora_rank:
        if model.dtype == "fp32":
            yield (
                "master_weight_type bf16 needs dtype bf16, got fp32, which would compute with "
                "weights that are rounded to bf16; set dtype bf16 or master_weight_type fp32"
            )
        if optimizer.ema_decay:
            yield (
                f"ema_decay needs master_weight_type fp32, got {optimizer.ema_decay:g} and bf16, "
                "where an EMA update rounds to zero; set master_weight_type fp32 or ema_decay 0"
            )
    if model.base_weight_dtype == "fp8" and not optimizer.lora_rank:
        merged = (
            " after merging the LoRA in pretrained_lora_path"
            if optimizer.pretrained_lora_path
            else ""
        )
        yield (
            "base_weight_dtype fp8 needs a lora_rank above 0, got 0, which trains the base "
            f"weights{merged}; set lora_rank or base_weight_dtype bf16"
        )
    if model.base_weight_dtype == "fp8" and config.distributed.enable_fsdp:
        yield (
            "base_weight_dtype fp8 cannot be used with enable_fsdp true, because FSDP cannot shard "
            "fp8 weights; set enable_fsdp false or base_weight_dtype bf16"
        )
    if optimizer.lora_target_modules and not optimizer.lora_rank:
        yield (
            "lora_target_modules needs a lora_rank above 0, got 0, which trains all weights; set "
            "lora_rank or remove lora_target_modules"
        )
    for pattern in optimizer.lora_target_modules:
        try:
            re.compile(pattern)
        except re.error as error:
            yield (
                f"lora_target_modules must be regular expressions, got {quote(pattern)}: {error}; "
                "correct it"
            )


def data_problems(inputs: RunInputs) -> Problems:
    if not inputs.config.data.prompts_csv and not inputs.config.uses_pairs:
        yield "prompts_csv must name a CSV file with a column `prompt`, got none"
    yield from machine.prompts_are_readable(inputs, existing=True)
    yield from machine.pairs_are_usable(inputs, existing=True)
    yield from machine.frames_fit_the_vae(inputs)
    yield from machine.sizes_fit_the_transformer(inputs)
    yield from machine.images_fit_the_version(inputs)
