"""Rules between settings: functions that yield a sentence for every violation (setting, value, fix).

What a single value may be is its type (`sections`, `objectives`). Imports no torch.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hyvideo.data.files import ROOT
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
from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings import machine_rules as machine
from hyvideo.settings.config import REWARD_PRESETS, Config, SettingsError, flat_weights
from hyvideo.settings.iteration_plan import num_stochastic_steps
from hyvideo.settings.machine_rules import problem_of
from hyvideo.settings.objectives import DPOSettings
from hyvideo.settings.reference_flags import REFERENCE_SCORERS
from hyvideo.settings.reward_settings import given_reward_weights, reward_options
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sampling import Sampling, parse_interval
from hyvideo.settings.sections import MAX_STEPS, RewardSettings

Problems = Iterator[str]


def check(
    config: Config, world_size: int = 1, *, file: str = "", on_this_machine: bool = True
) -> RunInputs:
    """Return the inputs of a run, as far as the rules have read them.

    ``file`` is the YAML file of the settings, if there is one. Raises ValueError with every rule
    that the settings violate and, if requested, what this machine lacks.
    """
    inputs = RunInputs(config, world_size)
    problems = [
        *between_settings(config, world_size, file),
        *machine.data_problems(inputs),
    ]
    if on_this_machine:
        problems += machine.machine_problems(inputs)
    raise_problems(problems)
    return inputs


def between_settings(config: Config, world_size: int, file: str = "") -> Problems:
    """Yield the rules that the settings violate, without reading files other than custom code."""
    yield from layout_problems(world_size, config, file)
    yield from process_problems(config, world_size)
    yield from text_problems(config)
    yield from sampler_problems(config)
    yield from objective_problems(config)
    yield from trust_region_problems(config)
    yield from reward_problems(config.reward)
    yield from weight_problems(config)
    yield from record_problems(config)


def all_problems(error: SettingsError, world_size: int, file: str = "") -> list[str]:
    """Return the problems of settings that are no `Config`, and those of the rules that do not
    concern them.
    """
    problems = list(error.problems)
    try:
        rest = Config.from_flat(error.valid).resolved()
        others = [*between_settings(rest, world_size, file)]
    except (ValueError, TypeError):
        return problems
    for problem in others:
        if not error.names & set(re.findall(r"\w+", problem)):
            problems.append(problem)
    return problems


def check_sampling(config: Config, sampling: Sampling, *, output: Path) -> None:
    """Raise ValueError as `check` does, for sampling of videos into ``output``."""
    problems = [
        *text_problems(config),
        *problem_of(sampling.transitions),
        *machine.checkpoints_exist(config.model.pretrained_model_root),
        *machine.folders_can_be_written("the output", output),
    ]
    raise_problems(problems)


def check_evaluation(config: Config, *, output: Path, has_model: bool) -> None:
    """Raise ValueError as `check` does, for an evaluation of a model or, if not ``has_model``, of
    videos.
    """
    problems = [
        *text_problems(config),
        *reward_problems(config.reward),
        *machine.folders_can_be_written("the output", output),
    ]
    if has_model:
        problems += machine.checkpoints_exist(config.model.pretrained_model_root)
    raise_problems(problems)


def raise_problems(problems: Iterable[str]) -> None:
    message = "\n".join(dict.fromkeys(problems))  # without repetitions
    if message:
        raise ValueError(message)


# --- processes and batches ------------------------------------------------------------------------


def layout_problems(world_size: int, config: Config, file: str = "") -> Problems:
    """Yield why the rollouts of an iteration cannot be divided among the processes.

    If the file is for another number of processes, or one process cannot hold a group, the message
    says how to start them.
    """
    problems = list(_problems_of_layout(config, world_size))
    if not problems:
        yield from group_problems(config)
        return
    number = planned_world_size(config, file)
    is_for_others = world_size == 1 or _gpus_of_name(file)
    if number == world_size or not is_for_others or list(_problems_of_layout(config, number)):
        yield from problems
        return
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    distributed = config.distributed
    rollout = config.rollout
    reason = f"batch_size {rollout.batch_size} and num_generations {rollout.num_generations}"
    if world_size % (distributed.sp_size * distributed.dp_replicate):
        reason = f"sp_size {distributed.sp_size} and dp_replicate {distributed.dp_replicate}"
    ways = [f"start it with `torchrun --nproc_per_node={number} post_train.py ...`"]
    if number > 8 and number % 8 == 0:
        ways = [f"start it on {number // 8} nodes of 8 GPUs (docs/multinode.md)"]
    smaller = config_for(world_size, file)
    if smaller:
        ways.append(f"use {smaller}")
    batch = fitting_batch(config, world_size)
    if batch and not list(_problems_of_layout(config.with_settings(batch_size=batch), world_size)):
        ways.append(f"set batch_size {batch}")
    yield (
        f"this run has {processes}, and its settings are for {number} ({reason}): "
        f"{', or '.join(ways)}"
    )


def _problems_of_layout(config: Config, world_size: int) -> Problems:
    distributed = config.distributed
    problems = list(rank_problems(world_size, distributed.sp_size, distributed.dp_replicate))
    yield from problems or batch_problems(config, world_size)


def rank_problems(world_size: int, sp_size: int, dp_replicate: int = 1) -> Problems:
    """Yield why this layout of ranks is not possible, and the possible values."""
    if world_size % sp_size:
        start = f"possible values: {_divisors(world_size)}"
        if world_size == 1:
            start = f"start {sp_size} with torchrun --nproc_per_node={sp_size}"
        yield (
            f"sp_size must divide the number of processes ({world_size}), got {sp_size}; {start}"
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
    batch = rollout.batch_size
    group = rollout.num_generations
    num_updates = config.objective.updates
    replicas = world_size // config.distributed.sp_size
    if (batch * replicas) % group:
        yield (
            f"a batch must consist of whole groups: batch_size {batch} x replicas {replicas} = "
            f"{batch * replicas} is not a multiple of num_generations {group}; use batch_size "
            f"{fitting_batch(config, world_size)}, or change num_generations"
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


def fitting_batch(config: Config, world_size: int) -> int | None:
    """Return the next larger batch_size with whole, evenly distributed groups; None if the layout
    of ranks is not possible.
    """
    sp_size = config.distributed.sp_size
    if world_size % sp_size:
        return None
    replicas = world_size // sp_size
    group = config.rollout.num_generations
    for batch in itertools.count(config.rollout.batch_size):
        if (batch * replicas) % group == 0 and (batch % group == 0 or group % batch == 0):
            return batch


def group_problems(config: Config) -> Problems:
    group = config.rollout.num_generations
    if group < 2 and config.objective.needs_rewards:
        yield (
            "num_generations must be at least 2, because advantages compare the rollouts of a "
            f"group, got {group}; raise num_generations"
        )


def planned_world_size(config: Config, file: str = "") -> int:
    """Return the number of processes that the batches of a run need.

    The number in the name of the file comes first, such as 64 in ``configs/..._64gpu.yaml``; then
    1, 8 and the numbers between them. Returns 1 if none of them fits.
    """
    for number in (*_gpus_of_name(file), 1, 8, *range(2, 8)):
        if not list(_problems_of_layout(config, number)):
            return number
    return 1


def _gpus_of_name(file: str) -> list[int]:
    """Return the numbers of GPUs in the name of a file."""
    return [int(number) for number in re.findall(r"([1-9]\d{0,3})gpu", Path(file).name)]


def config_for(world_size: int, file: str) -> str | None:
    """Return the shipped config of the same model for this number of processes, if there is one."""
    model = re.match(r"[a-z]+\d+", Path(file).name)
    if not model:
        return None
    found = sorted((ROOT / "configs").glob(f"{model[0]}*_{world_size}gpu.yaml"))
    return f"configs/{found[0].name}" if found else None


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


# --- sampling -------------------------------------------------------------------------------------


def text_problems(config: Config) -> Problems:
    """Yield texts that stand for something and cannot be read."""
    for name, value in config.flat().items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not _is_utf8(text):
                yield f"{name} must be text in UTF-8, got {quote(text)}; rename the file or folder"
    record = config.record
    if (record.validation_height == 0) != (record.validation_width == 0):
        yield (
            "validation_height and validation_width must both be set or both be 0, got "
            f"{record.validation_height} and {record.validation_width}"
        )
    yield from problem_of(parse_interval, config.rollout.guidance_interval)
    if config.data.negative_prompt:
        yield from problem_of(check_prompt, config.data.negative_prompt, "as negative_prompt")
    version = config.model.transformer_version
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


def sampler_problems(config: Config) -> Problems:
    """Yield an invalid sampler, eta, noise to match or guidance interval."""
    sampling = config.sampling
    problems = [*problem_of(sampler_of, sampling.sampler), *problem_of(lambda: sampling.levels)]
    problems += problem_of(parse_interval, sampling.guidance_interval)
    if problems:
        yield from problems
        return
    if config.rollout.match_noise:
        yield from problem_of(config.matched_eta)
    yield from problem_of(sampling.transitions)
    validation = config.validation_sampling
    if config.data.valid_video_csv:
        for problem in problem_of(validation.transitions):
            yield f"validation_eta {validation.eta:g} cannot be used: {problem}"
    scale = max(sampling.guidance_scale, config.anchor_cfg_scale)
    if scale > 1 and max(sampling.branches(scale)) == 1:
        yield (
            "guidance_interval must contain at least one step of the schedule, because no video "
            f"would be guided, got {sampling.guidance_interval} and {sampling.describe()}; widen "
            "the interval"
        )


# --- objectives -----------------------------------------------------------------------------------


def objective_problems(config: Config) -> Problems:
    """Yield what the objective cannot be used with."""
    objective = config.objective
    if objective.trains == "steps":
        yield from problem_of(_some_step_is_stochastic, config)
    elif objective.trains == "path":
        yield from distill_problems(config)
    else:
        yield from level_problems(config)
    if objective.reward_weight:
        yield from reward_gradient_problems(config)
    if isinstance(objective, DPOSettings):
        yield from pair_problems(config)
    if config.reward.ignore_rewards and not objective.scores_rollouts:
        yield (
            f"ignore_rewards cannot be used with objective {objective.name}, which scores no "
            "rollout, got true; remove it"
        )


def _some_step_is_stochastic(config: Config) -> None:
    """Raise ValueError if no step can be trained."""
    sampling = config.sampling
    if num_stochastic_steps(sampling, config.objective.window) == 0:
        raise ValueError(
            "the sampler must have at least one stochastic step to train, got none with sde_type "
            f"{sampling.sampler}, eta {sampling.eta}, {sampling.steps} steps and last_step "
            f"{sampling.last_step}; raise eta or grpo_sampling_steps"
        )


def level_problems(config: Config) -> Problems:
    """Yield what noise levels cannot be trained with."""
    name = config.objective.name
    version = version_defaults(config.model.transformer_version)
    rollout = config.rollout
    if version.reads_ends:
        yield from flow_map_problems(config, version.name)
    elif version.kind == "step_distilled":
        yield (
            f"objective {name} trains at any noise level, but transformer_version {version.name} "
            "is step-distilled and only covers the levels of its few steps; use another version or "
            "objective grpo"
        )
    if rollout.use_same_noise and rollout.eta == 0:
        yield (
            "use_same_noise needs eta above 0, because with eta 0 all rollouts of a group are "
            "identical, got 0; remove use_same_noise or raise eta"
        )
    if name == "draft" and config.objective.strategy == "none" and config.objective.nft_levels:
        yield (
            "objective draft measures the KL at the noise levels of nft_levels, and kl_strategy "
            f"none has no KL, got nft_levels {config.objective.nft_levels}; set nft_levels 0 or a "
            "kl_strategy"
        )


def flow_map_problems(config: Config, version: str) -> Problems:
    """Yield settings with which noise levels of a flow map cannot be trained."""
    objective = config.objective
    if objective.name in ("dpo", "draft"):
        yield (
            f"objective {objective.name} needs a model of velocities, but transformer_version "
            f"{version} is a flow map, which predicts the mean velocity of a step; use objective "
            "nft or grpo, or another version"
        )
    elif objective.reward_weight > 0:
        yield (
            "reward_gradient_weight needs a model of velocities, but transformer_version "
            f"{version} is a flow map, which predicts the mean velocity of a step, got "
            f"{objective.reward_weight:g}; set reward_gradient_weight 0"
        )
    if config.rollout.cfg_scale > 1:
        yield (
            f"objective {objective.name} needs cfg_scale 1 with the flow map {version}, because "
            "guided mean velocities are not the mean velocities of the guided model, got "
            f"{config.rollout.cfg_scale:g}; set cfg_scale 1"
        )


def reward_gradient_problems(config: Config) -> Problems:
    """Yield what a reward gradient cannot be computed with."""
    reward = config.reward
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
    differentiable = ", ".join(name for name, entry in SCORERS.items() if entry.has_gradient)
    for name in reward.reward_model:
        is_known = name in SCORERS or ":" in name
        if is_known and not list(problem_of(has_gradient, name)) and not has_gradient(name):
            yield (
                "reward_gradient_weight needs scorers with a gradient, got reward_model "
                f"{name}, which has no score_with_gradient; use {differentiable} or a class "
                f"with that method, or train {name} with objective nft or grpo and "
                "reward_gradient_weight 0"
            )


def pair_problems(config: Config) -> Problems:
    """Yield what an objective on rated pairs cannot be used with."""
    name = config.objective.name
    rollout = config.rollout
    yield from pair_weights_are_numbers(config.objective.pair_weights)
    for setting, scale in {
        "cfg_scale": rollout.cfg_scale,
        "anchor_cfg_scale": config.anchor_cfg_scale,
    }.items():
        if scale > 1:
            yield (
                f"objective {name} trains the model without guidance, got {setting} {scale:g}; set "
                f"{setting} 1, and validation_cfg_scale to the guidance of your videos"
            )
    if rollout.num_generations != 2:
        yield (
            f"objective {name} needs num_generations 2, because a group is a winner and a loser, "
            f"got {rollout.num_generations}; set num_generations 2"
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
        weights = json.loads(text)
    except ValueError:
        weights = None
    values = list(weights.values()) if isinstance(weights, dict) else []
    are_numbers = all(type(value) in (int, float) and 0 <= value <= MAX_SCORE for value in values)
    if not are_numbers or not any(values):
        yield (
            "pair_weights must be a JSON object with a number from 0 for each dimension, such as "
            f'{{"Overall": 1}}, at least one of them above 0, got {quote(text)}'
        )


def distill_problems(config: Config) -> Problems:
    """Yield settings with which a student cannot follow its teacher."""
    rollout = config.rollout
    num_levels = rollout.grpo_sampling_steps * config.objective.anchor_substeps
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
    if num_levels > MAX_STEPS:
        yield (
            "the steps of the teacher, grpo_sampling_steps times anchor_substeps, must be at most "
            f"{MAX_STEPS}, got {num_levels}; lower anchor_substeps"
        )


def trust_region_problems(config: Config) -> Problems:
    """Yield KL terms, coefficients and anchors that contradict each other."""
    trust = config.objective
    strategy = trust.strategy
    version = config.model.transformer_version
    has_coefficient = "kl_weight" in type(trust).model_fields
    if config.reward.ignore_rewards and strategy == "none" and trust.scores_rollouts:
        yield (
            "ignore_rewards trains on the KL terms alone, got kl_strategy none, which leaves "
            "nothing to train on; set kl_weight and a strategy"
        )
    if has_coefficient and trust.kl_strategy == "none" and trust.kl_weight > 0:
        yield (
            f"kl_strategy none needs kl_weight 0, got {trust.kl_weight}; set kl_weight 0 or choose "
            "a strategy"
        )
    if (
        has_coefficient
        and strategy != "none"
        and not trust.kl_min_coef <= trust.kl_coef <= trust.kl_weight
    ):
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
    if trust.anchor_moves and trust.update_ref_model_step % trust.updates:
        yield (
            "update_ref_model_step must be a multiple of num_updates_per_rollout, because the "
            f"anchor is refreshed between iterations, got {trust.update_ref_model_step} and "
            f"{trust.updates}; use "
            f"{math.ceil(trust.update_ref_model_step / trust.updates) * trust.updates}"
        )


# --- rewards --------------------------------------------------------------------------------------


def reward_problems(reward: RewardSettings) -> Problems:
    """Yield unknown scorers and invalid options or weights."""
    if not reward.reward_model:
        yield (
            f"reward_model must name at least one of {', '.join(SCORERS)} or FILE.py:CLASS, got "
            "none"
        )
    for setting in ("reward_model", "held_out_reward_model"):
        named = getattr(reward, setting)
        unknown = [name for name in named if name not in SCORERS and ":" not in name]
        if unknown:
            message = (
                f"{setting} must be one of {', '.join(SCORERS)} or FILE.py:CLASS, got "
                f"{', '.join(map(quote, unknown))}"
            )
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
            yield from problem_of(scorer_class, name)
    if reward.score_between_stages and not (reward.reward_offload or reward.remote_reward_url):
        yield (
            "score_between_stages needs reward_offload true, which takes the scorers off the GPU "
            "during the other stages, got false; set reward_offload true or remove "
            "score_between_stages"
        )
    yield from problem_of(reward_options, reward)
    yield from weights_are_numbers(reward)


def weights_are_numbers(reward: RewardSettings) -> Problems:
    """Yield reward weights that are neither a preset nor a JSON object of finite numbers, not all
    0.
    """
    text = reward.reward_weights
    if text in REWARD_PRESETS:
        return
    try:
        given = given_reward_weights(reward)
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
    names = set()
    for name, value in given.items():
        names |= set(value) if isinstance(value, dict) else {name}
    taken = names & {*RESERVED_NAMES, OVERALL}
    if taken:
        yield (
            f"reward_weights must not use the names {', '.join(sorted(taken))}, which are reserved "
            "for records; rename the dimensions of your scorer"
        )
    scorers = [name for name, value in given.items() if isinstance(value, dict)]
    unknown = [
        name for name in scorers if REFERENCE_SCORERS.get(name, name) not in reward.reward_model
    ]
    if unknown:
        yield (
            "reward_weights must name the scorers of reward_model, "
            f"{', '.join(reward.reward_model)}, got {', '.join(map(quote, unknown))}; remove them "
            "or add them to reward_model"
        )


# --- weights and records --------------------------------------------------------------------------


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
        merged = ""
        if optimizer.pretrained_lora_path:
            merged = " after merging the LoRA in pretrained_lora_path"
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


def record_problems(config: Config) -> Problems:
    record = config.record
    unknown = set(record.report_to) - {*machine.REPORTS, "none"}
    if unknown:
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
    elif not record.validate_at_step0:
        yield (
            f"on_reward_hacking {record.on_reward_hacking} needs a validation of the base model, "
            "with which it compares the others, got validate_at_step0 false; set validate_at_step0 "
            "true or use on_reward_hacking warn"
        )
