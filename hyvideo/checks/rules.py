"""Rules between settings: functions that yield a sentence for every violation (setting, value, fix).

What a single value may be is its type (`settings.sections`, `settings.objectives`). The rules of
processes and objectives are in `layout` and `objective_rules`, and those of rewards in
`settings.reward_settings`. Imports no torch.
"""

from pathlib import Path

from hyvideo.checks import machine_rules as machine
from hyvideo.checks.layout import layout_problems
from hyvideo.checks.objective_rules import check_noise, objective_problems
from hyvideo.models.versions import version_defaults
from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings.config import Config
from hyvideo.settings.problems import Problems, problem_of, raise_problems
from hyvideo.settings.reward_settings import reward_problems, weighted_dimensions_exist
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import (
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    ValidationSettings,
)


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


def with_local_weights(config: Config) -> Config:
    """Return the settings with a local folder of weights, after the download of a repository.

    Raises ValueError as `hub.local_folder` does.
    """
    from hyvideo.weights.hub import local_folder  # slow to import

    return config.with_settings(
        pretrained_model_root=local_folder(config.model.pretrained_model_root)
    )


def between_settings(config: Config, world_size: int, file: str = "") -> Problems:
    """Yield the rules that the settings violate, without reading files other than custom code."""
    yield from layout_problems(config, world_size, file)
    yield from sampler_problems(config)
    yield from objective_problems(config)
    problems = list(reward_problems(config.reward))
    yield from problems or weighted_dimensions_exist(config.reward)
    yield from weight_problems(config.model, config.optimizer, config.distributed.enable_fsdp)
    yield from offload_problems(config)
    yield from validation_problems(config.validation, bool(config.data.valid_video_csv))
    distributed = config.distributed
    if distributed.dp_replicate > 1 and not distributed.enable_fsdp:
        yield (
            "dp_replicate needs enable_fsdp true, because without sharding every rank has a copy, "
            f"got {distributed.dp_replicate} and false; set enable_fsdp true or dp_replicate 1"
        )


def check_sampling(sampling: Sampling, *, root: str, version: str, output: Path) -> None:
    """Raise ValueError as `check` does, for sampling of videos into ``output`` with a version of a
    model below ``root``.
    """
    raise_problems(
        [
            *problem_of(sampling.transitions),
            *problem_of(check_noise, version_defaults(version), "sampling", sampling),
            *machine.checkpoints_exist(root),
            *machine.folders_can_be_written("the output", output),
        ]
    )


def check_evaluation(reward: RewardSettings, *, root: str | None, output: Path) -> None:
    """Raise ValueError as `check` does, for an evaluation of a model below ``root`` or, without
    one, of videos.
    """
    problems = [
        *reward_problems(reward),
        *machine.folders_can_be_written("the output", output),
    ]
    if root is not None:
        problems += machine.checkpoints_exist(root)
    raise_problems(problems)


def sampler_problems(config: Config) -> Problems:
    """Yield an invalid sampler or eta, and a guidance interval without a step."""
    sampling = config.ode_sampling
    problems = [
        *problem_of(sampler_of, config.rollout.sde_type),
        *problem_of(lambda: sampling.levels),
    ]
    if problems:
        yield from problems
        return
    yield from problem_of(lambda: config.sampling.transitions())
    validation = config.validation_sampling
    if config.data.valid_video_csv:
        for problem in problem_of(validation.transitions):
            yield f"validation_eta {validation.eta:g} cannot be used: {problem}"
    is_guided = max(sampling.guidance.largest, config.anchor_cfg_scale) > 1
    branches = sampling.branches() + sampling.branches(config.anchor_guidance)
    if is_guided and max(branches) == 1:
        yield (
            "guidance_interval must contain at least one step of the schedule, because no video "
            f"would be guided, got {sampling.guidance_interval} and {sampling.describe()}; widen "
            "the interval"
        )


def weight_problems(
    model: ModelSettings, optimizer: OptimizerSettings, enable_fsdp: bool
) -> Problems:
    """Yield combinations of precisions, LoRA, EMA and sharding that cannot be trained."""
    if model.base_weight_dtype == "fp8" and not optimizer.lora_rank:
        yield (
            "base_weight_dtype fp8 needs a lora_rank above 0, got 0, which trains the base "
            "weights; set lora_rank or base_weight_dtype bf16"
        )
    if model.base_weight_dtype == "fp8" and enable_fsdp:
        yield (
            "base_weight_dtype fp8 cannot be used with enable_fsdp true, because FSDP cannot shard "
            "fp8 weights; set enable_fsdp false or base_weight_dtype bf16"
        )
    if optimizer.lora_target_modules and not optimizer.lora_rank:
        yield (
            "lora_target_modules needs a lora_rank above 0, got 0, which trains all weights; set "
            "lora_rank or remove lora_target_modules"
        )


def offload_problems(config: Config) -> Problems:
    """Yield places of the frozen weights that cannot be combined."""
    model, is_sharded = config.model, config.distributed.enable_fsdp
    for part in ("partner", "policy"):
        if part in model.offload and is_sharded:
            yield (
                f"offload {part} cannot be used with enable_fsdp true, which keeps a shard of the "
                f"weights on each GPU; remove {part} from offload, or set enable_fsdp false"
            )
    if model.partner_weight_dtype == "fp8" and is_sharded:
        yield (
            "partner_weight_dtype fp8 cannot be used with enable_fsdp true, because FSDP cannot "
            "shard fp8 weights; set enable_fsdp false or partner_weight_dtype bf16"
        )
    if "policy" not in model.offload:
        return
    if not config.optimizer.lora_rank:
        yield (
            "offload policy needs a lora_rank above 0, got 0, which trains the weights that would "
            "leave the GPU; set lora_rank or remove policy from offload"
        )
    if "reward" not in model.offload:
        yield (
            "offload policy needs offload reward, because otherwise scorers work beside the policy, "
            f"got {' '.join(model.offload)}; add reward, or remove policy"
        )


def validation_problems(validation: ValidationSettings, has_validation: bool) -> Problems:
    """Yield a size of validation videos with one side, and a hacking rule without validations."""
    if (validation.validation_height == 0) != (validation.validation_width == 0):
        yield (
            "validation_height and validation_width must both be set or both be 0, got "
            f"{validation.validation_height} and {validation.validation_width}"
        )
    if validation.on_reward_hacking == "warn":
        return
    if not has_validation:
        yield (
            f"on_reward_hacking {validation.on_reward_hacking} needs validation prompts, because it "
            "compares validations, got none; set valid_video_csv or use on_reward_hacking warn"
        )
    elif not validation.validate_at_step0:
        yield (
            f"on_reward_hacking {validation.on_reward_hacking} needs a validation of the base model, "
            "with which it compares the others, got validate_at_step0 false; set validate_at_step0 "
            "true or use on_reward_hacking warn"
        )
