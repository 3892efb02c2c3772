"""Rules that settings must satisfy: functions that yield a message for every violation, without importing torch."""

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hyvideo.config import machine_rules as machine
from hyvideo.config.command_line import reward_options
from hyvideo.config.machine_rules import Problems, problem_of
from hyvideo.config.reference_flags import REFERENCE_SCORERS
from hyvideo.config.run_inputs import RunInputs
from hyvideo.config.run_plan import branches_of_steps, num_stochastic_steps, parse_interval, stochastic_transitions
from hyvideo.config.sections import RewardSettings, RolloutSettings
from hyvideo.config.settings import REWARD_PRESETS, TRAITS, Config, eta_of, flat_weights
from hyvideo.data.outside import nearest, parse_json, quote
from hyvideo.data.prompts import check_prompt
from hyvideo.models.reward_models.rewards import (
    MAX_SCORE,
    OVERALL,
    RESERVED_NAMES,
    SCORERS,
    SERVICE_ATTEMPTS,
    scorer_class,
)
from hyvideo.models.versions import version_defaults
from hyvideo.schedulers.transitions import sampler_of


def check(config: Config, world_size: int = 1, *, on_this_machine: bool = True) -> RunInputs:
    """Return the inputs of a run, as far as the rules have read them.

    Raises ValueError with every rule that the settings violate and, if requested, what this machine lacks.
    """
    check_ranges(config.flat())  # the other rules compute with these numbers
    inputs = RunInputs(config, world_size)
    _raise(
        batch_problems(config, world_size),
        process_problems(config, world_size),
        sampler_problems(config),
        trust_region_problems(config),
        objective_problems(config),
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
        noise_can_be_matched(config.rollout) if is_stochastic and not ranges else (),
        problem_of(lambda: stochastic_transitions(as_sampled)) if is_stochastic and not ranges else (),
        machine.checkpoints_exist(config.model.pretrained_model_root),
        machine.folders_can_be_written("the output", output),
    )


def check_evaluation(config: Config, *, output: Path, has_model: bool) -> None:
    """Raise ValueError as `check` does, for an evaluation of a model or, if not ``has_model``, of videos."""
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
    if message := "\n".join(dict.fromkeys(itertools.chain.from_iterable(problems))):
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
    for name in ("sample_n_frames", "validation_num_frames"):
        if values[name] % 4 != 1 and (values[name] or name == "sample_n_frames"):
            yield f"{name} must be 4n + 1, got {values[name]}"
    height, width = values["validation_height"], values["validation_width"]
    if (height == 0) != (width == 0):
        yield f"validation_height and validation_width must both be set or both be 0, got {height} and {width}"
    yield from problem_of(lambda: parse_interval(values["guidance_interval"]))
    if negative_prompt := values["negative_prompt"]:
        yield from problem_of(lambda: check_prompt(negative_prompt, "as negative_prompt"))
    version = values["transformer_version"]
    if "/" in version or "\\" in version or version in (".", ".."):
        yield f"transformer_version must be the name of a folder in transformer/, not a path, got {quote(version)}"


def _is_utf8(text: str) -> bool:
    """Return whether text can be written; the bytes of an argument that are not UTF-8 become lone surrogates."""
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
            f"sp_size must divide the number of processes, got sp_size {sp_size} and WORLD_SIZE {world_size}; "
            f"{start if world_size == 1 else f'possible values: {_divisors(world_size)}'}"
        )
    elif world_size % (dp_replicate * sp_size):
        yield (
            f"dp_replicate must divide the {world_size // sp_size} data-parallel replicas ({world_size} processes, "
            f"sp_size {sp_size}), got {dp_replicate}; possible values: {_divisors(world_size // sp_size)}"
        )


def head_problems(sp_size: int, num_heads: int) -> Problems:
    if sp_size > num_heads:
        yield f"sp_size must be at most the {num_heads} attention heads, got {sp_size}; use {_divisors(num_heads)}"


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def batch_problems(config: Config, world_size: int) -> Problems:
    """Yield why the rollouts of an iteration do not form whole groups that are evenly distributed over the replicas."""
    rollout, distributed, num_updates = config.rollout, config.distributed, config.loss.num_updates_per_rollout
    if problems := [*layout_problems(world_size, distributed.sp_size, distributed.dp_replicate)]:
        yield from problems
        return
    batch, group, replicas = rollout.batch_size, rollout.num_generations, world_size // distributed.sp_size
    if (batch * replicas) % group:
        legal = next(b for b in itertools.count(batch) if (b * replicas) % group == 0 and 0 in (b % group, group % b))
        got = f"batch_size {batch} x replicas {replicas} = {batch * replicas}"
        yield f"a batch must consist of whole groups of num_generations {group}, got {got}; use batch_size {legal}"
    elif batch % group and group % batch:
        yield f"batch_size must be a multiple or a divisor of num_generations {group}, got {batch}"
    else:
        groups = batch * replicas * rollout.gradient_accumulation_steps // group
        if groups % num_updates:
            yield f"num_updates_per_rollout must divide the {groups} groups of an iteration, got {num_updates}"
    if group < 2:
        yield f"num_generations must be at least 2, since advantages compare the rollouts of a group, got {group}"


def planned_world_size(config: Config, words: str) -> int:
    """Return the number of processes that the batches of a run need.

    The number in the name of a config comes first, such as 64 in ``configs/..._64gpu.yaml``, which is part of
    ``words``; then 1, 8 and the numbers between them. Returns 1 if none of them fits.
    """
    named = [int(number) for number in re.findall(r"([1-9]\d{0,3})gpu", words)]
    for number in (*named, 1, 8, *range(2, 8)):
        if not list(batch_problems(config, number)):
            return number
    return 1


def process_problems(config: Config, world_size: int) -> Problems:
    """Yield problems of replicas without sharding, and of watchdog or reward timeouts above the collective timeout."""
    distributed, reward = config.distributed, config.reward
    if distributed.dp_replicate > 1 and not distributed.enable_fsdp:
        yield f"dp_replicate {distributed.dp_replicate} needs enable_fsdp; set enable_fsdp true or dp_replicate 1"
    report, timeout = distributed.watchdog_seconds, distributed.collective_timeout
    if world_size > 1 and report > 0.9 * timeout:
        rule = f"watchdog_seconds must be at most 0.9 of collective_timeout {timeout:g}"
        yield f"{rule}, got {report:g}; lower it, or set it to 0 to disable the report"
    number = len(reward.remote_reward_url.split(",")) if reward.remote_reward_url else 0
    seconds = SERVICE_ATTEMPTS * number * reward.remote_reward_timeout
    if world_size > 1 and seconds > (deadline := distributed.reward_deadline):
        rule = f"{SERVICE_ATTEMPTS} attempts at {number} reward services must take at most 0.8 of collective_timeout"
        yield f"{rule}, got {seconds:g} s and {deadline:g} s; lower remote_reward_timeout or raise collective_timeout"


def noise_can_be_matched(rollout: RolloutSettings) -> Problems:
    if rollout.match_noise:
        yield from problem_of(lambda: eta_of(rollout))


def sampler_problems(config: Config) -> Problems:
    """Yield an invalid eta, window, noise to match or custom sampler, and a guidance interval without steps."""
    rollout, scale = config.rollout, max(config.rollout.cfg_scale, config.anchor_cfg_scale)
    yield from noise_can_be_matched(rollout)
    yield from problem_of(lambda: stochastic_transitions(rollout))
    if scale > 1 and max(branches_of_steps(rollout, scale)) == 1:
        steps = f"{rollout.grpo_sampling_steps} steps with shift {rollout.shift:g}"
        yield f"guidance_interval must contain one of the {steps}, got {rollout.guidance_interval}; widen it"


def objective_problems(config: Config) -> Problems:
    """Yield a rollout without trained steps for grpo, and what nft cannot train with."""
    rollout, version = config.rollout, version_defaults(config.model.transformer_version)
    if config.loss.objective == "grpo":
        yield from problem_of(lambda: some_step_is_stochastic(rollout))
        return
    if version.kind == "step_distilled":
        yield f"objective nft cannot train the step-distilled {version.name}; use another version or objective grpo"
    if rollout.sde_window:
        yield f"sde_window cannot be used with objective nft, got {quote(rollout.sde_window)}; remove it"
    if rollout.use_same_noise and rollout.eta == 0:
        yield "use_same_noise with eta 0 makes all rollouts of a group identical; remove use_same_noise or raise eta"


def some_step_is_stochastic(rollout: RolloutSettings) -> None:
    """Raise ValueError if no step can be trained."""
    if num_stochastic_steps(rollout) == 0:
        raise ValueError(
            f"the sampler must have at least one stochastic step to train, got none with sde_type {rollout.sde_type}, "
            f"eta {rollout.eta}, {rollout.grpo_sampling_steps} steps and last_step {rollout.last_step}; raise eta or "
            "grpo_sampling_steps"
        )


def trust_region_problems(config: Config) -> Problems:
    trust, strategy, version = config.trust_region, config.kl_strategy, config.model.transformer_version
    if config.reward.ignore_rewards and strategy == "none":
        yield "ignore_rewards trains on the KL terms alone, got kl_strategy none; set kl_weight and a strategy"
    if trust.kl_strategy == "none" and trust.kl_weight > 0:
        yield f"kl_strategy none needs kl_weight 0, got {trust.kl_weight}; set kl_weight 0 or choose a strategy"
    if strategy != "none" and not trust.kl_min_coef <= trust.kl_coef <= trust.kl_weight:
        got = f"{trust.kl_min_coef:g}, {trust.kl_coef:g} and {trust.kl_weight:g}"
        yield f"the coefficients must satisfy kl_min_coef <= kl_coef <= kl_weight, got {got}"
    if (trust.anchor_cfg_scale or 0) > 1 and version_defaults(version).kind.endswith("distilled"):
        got = f"{trust.anchor_cfg_scale:g} with transformer_version {version}"
        yield f"anchor_cfg_scale must be 1 if guidance is distilled into the weights, got {got}; set it to 1"
    if config.anchor_has_own_guidance and strategy.endswith("moving"):
        yield (
            f"anchor_cfg_scale needs a fixed anchor, got {config.anchor_cfg_scale:g} with kl_strategy {strategy}; set "
            "kl_strategy fixed or dual_fixed, or anchor_cfg_scale to that of the policy"
        )
    num_updates = config.loss.num_updates_per_rollout
    if config.anchor_moves and trust.update_ref_model_step % num_updates:
        rule = f"update_ref_model_step must be a multiple of num_updates_per_rollout {num_updates}"
        yield f"{rule}, got {trust.update_ref_model_step}"


def reward_problems(reward: RewardSettings) -> Problems:
    """Yield unknown scorers and invalid options or weights."""
    if not reward.reward_model:
        yield f"reward_model must name at least one of {', '.join(SCORERS)} or FILE.py:CLASS, got none"
    for setting in ("reward_model", "held_out_reward_model"):
        if unknown := [name for name in getattr(reward, setting) if name not in SCORERS and ":" not in name]:
            hint, names = nearest(unknown[0], SCORERS), ", ".join(SCORERS)
            got = ", ".join(map(quote, unknown))
            yield f"{setting} must be one of {names} or FILE.py:CLASS, got {got}{hint and '; ' + hint}"
    named = [*reward.reward_model, *reward.held_out_reward_model]
    if len(set(named)) < len(named):
        yield f"reward_model and held_out_reward_model must name each scorer once, got {', '.join(named)}"
    for name in reward.loaded_scorers:
        yield from problem_of(lambda name=name: ":" in name and scorer_class(name))
    if reward.score_between_stages and not (reward.reward_offload or reward.remote_reward_url):
        yield "score_between_stages needs reward_offload true, got false; set it to true or remove score_between_stages"
    yield from problem_of(lambda: reward_options(reward))
    yield from weights_are_numbers(reward)


def weights_are_numbers(reward: RewardSettings) -> Problems:
    """Yield reward weights that are neither a preset nor a JSON object of finite numbers, not all 0."""
    text = reward.reward_weights
    if text in REWARD_PRESETS:
        return
    try:
        given = parse_json(text)
        weights = flat_weights(given)
    except (ValueError, AttributeError):  # invalid JSON, or not an object
        given, weights = {}, {}
    are_numbers = all(type(weight) in (int, float) and abs(weight) <= MAX_SCORE for weight in weights.values())
    if not are_numbers or not any(weights.values()):
        yield (
            f"reward_weights must be {', '.join(REWARD_PRESETS)} or a JSON object with a number for each dimension, "
            f"such as VQ, MQ and TA, of at most {MAX_SCORE:g} and at least one of them not 0, got {quote(text)}"
        )
    by_scorer = [value if isinstance(value, dict) else {name: value} for name, value in given.items()]
    names = {dimension for dimensions in by_scorer for dimension in dimensions}
    if taken := names & {*RESERVED_NAMES, OVERALL}:
        yield f"reward_weights must not use the names {', '.join(sorted(taken))}, which are reserved for records"
    scorers = [REFERENCE_SCORERS.get(name, name) for name, value in given.items() if isinstance(value, dict)]
    if unknown := [name for name in scorers if name not in reward.reward_model]:
        got, known = ", ".join(map(quote, unknown)), ", ".join(reward.reward_model)
        yield f"reward_weights must name the scorers of reward_model, {known}, got {got}"


def record_problems(config: Config) -> Problems:
    record = config.record
    if unknown := set(record.report_to) - {*machine.REPORTS, "none"}:
        yield f"report_to must be tensorboard, wandb or none, got {', '.join(sorted(unknown))}"
    if record.on_reward_hacking == "warn":
        return
    action = f"on_reward_hacking {record.on_reward_hacking}"
    if not config.data.valid_video_csv:
        yield f"{action} needs validation prompts; set valid_video_csv or use on_reward_hacking warn"
    elif not record.validate_at_step0 and not record.resume_from_checkpoint:
        yield f"{action} needs a validation of the base model; set validate_at_step0 true or use on_reward_hacking warn"


def weight_problems(config: Config) -> Problems:
    """Yield combinations of precisions, LoRA, EMA and sharding that cannot be trained."""
    model, optimizer = config.model, config.optimizer
    if model.master_weight_type == "bf16" and not optimizer.lora_rank:  # a LoRA is always in float32
        if model.dtype == "fp32":
            yield "master_weight_type bf16 needs dtype bf16, got fp32; set dtype bf16 or master_weight_type fp32"
        if optimizer.ema_decay:
            yield f"ema_decay needs master_weight_type fp32, got {optimizer.ema_decay:g} and bf16; change one of them"
    if model.base_weight_dtype == "fp8" and not optimizer.lora_rank:
        yield "base_weight_dtype fp8 needs a lora_rank above 0, got 0; set lora_rank or base_weight_dtype bf16"
    if model.base_weight_dtype == "fp8" and config.distributed.enable_fsdp:
        yield "base_weight_dtype fp8 cannot be sharded, got enable_fsdp true; set it to false, or use bf16"
    if optimizer.lora_target_modules and not optimizer.lora_rank:
        yield "lora_target_modules needs a lora_rank above 0, got 0; set lora_rank"
    for pattern in optimizer.lora_target_modules:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"lora_target_modules must be regular expressions, got {quote(pattern)}: {error}"


def data_problems(inputs: RunInputs) -> Problems:
    if not inputs.config.data.prompts_csv:
        yield "prompts_csv must name a CSV file with a column `prompt`, got none"
    yield from machine.prompts_are_readable(inputs, existing=True)
    yield from machine.videos_fit_the_version(inputs)
