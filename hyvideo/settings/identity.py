"""Settings that must agree for a resumed run, an experiment and an evaluation; derived from the
settings' traits. And the files of code and weights that settings name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hyvideo.files.custom_code import code_files
from hyvideo.settings.config import Config
from hyvideo.settings.objectives.base import TrustRegionSettings
from hyvideo.settings.reward_settings import is_json
from hyvideo.settings.sections import ModelSettings

# Settings that only name files, besides the videos of an objective. The contents are compared
# (`input_digests`), not the paths, because files may move.
READ_FILES = (
    "prompts_csv",
    "reward_config",
    "pretrained_lora_path",
    "base_lora_path",
    "low_noise_base_lora_path",
)


class Changes(NamedTuple):
    """Settings that differ from those that a run started with, by name, each with a description."""

    free: dict[str, str]  # may change
    affecting_learning: dict[str, str]  # need allow_changed_settings


def changed_settings(
    saved: Mapping[str, object], now: Mapping[str, object], *, same_rollouts: bool
) -> Changes:
    """Compare the settings of a run with the current ones; absent ones had their default.

    With ``same_rollouts``, the number of rollouts per iteration is unchanged, so that their layout
    may change.
    """
    changes = Changes({}, {})
    config = Config.from_flat(now)
    leaves = config.leaves()
    version = saved.get("transformer_version", leaves["transformer_version"].default)
    before = config.with_settings(transformer_version=version).defaults | dict(saved)
    for name, value in now.items():
        decides, was = leaves[name].decides, before.get(name)
        is_read = name in (*READ_FILES, config.objective.videos_from)
        if decides == "start" or (is_read and was and value) or _is_same(was, value):
            continue
        is_free = decides in ("machine", "records") or (decides == "layout" and same_rollouts)
        found = changes.free if is_free else changes.affecting_learning
        found[name] = f"{name} is {value!r} and was {was!r}"
    return changes


def _is_same(was: object, value: object) -> bool:
    """Return whether two values of a setting are equal, also as JSON with other blanks."""
    if isinstance(was, str) and isinstance(value, str) and is_json(was) and is_json(value):
        return json.loads(was) == json.loads(value)
    return was == value


def code_of(config: Config) -> dict[str, list[Path]]:
    """Return the files of custom code that settings name: scorers, sampler and objective."""
    named = {
        "reward_model": code_files(config.reward.reward_model),
        "sde_type": code_files([config.rollout.sde_type]),
        "objective": code_files([config.objective.name]),
    }
    return {name: files for name, files in named.items() if files}


def base_loras_of(model: ModelSettings) -> dict[str, Path]:
    """Return the paths of the LoRAs that are merged into the base model, by setting."""
    paths = {
        "base_lora_path": model.base_lora_path,
        "low_noise_base_lora_path": model.low_noise_base_lora_path,
    }
    return {name: Path(path) for name, path in paths.items() if path}


def weights_of(config: Config) -> dict[str, Path]:
    """Return the paths of the LoRAs that a run starts from and of the anchor, by setting."""
    paths = {
        "pretrained_lora_path": config.optimizer.pretrained_lora_path,
        "anchor_path": config.objective.anchor_path,
    }
    named = {name: Path(path) for name, path in paths.items() if path}
    return base_loras_of(config.model) | named


def experiment_settings(config: Config) -> dict[str, object]:
    """Return the settings that affect learning; without KL terms, ``kl_strategy`` alone for the
    trust region.
    """
    leaves = config.leaves()
    settings = {
        name: value
        for name, value in config.flat().items()
        if leaves[name].decides in ("learning", "layout")
    }
    strategy = config.objective.strategy
    if strategy == "none":
        for name in TrustRegionSettings.model_fields:
            settings.pop(name, None)
        settings["num_updates_per_rollout"] = config.objective.updates
    return settings | {"kl_strategy": strategy}


def evaluation_settings(config: Config) -> dict[str, object]:
    """Return the settings, except paths, that affect an evaluation; frames, size and noise levels
    are those of validation.
    """
    leaves = config.leaves()
    sampling = config.validation_sampling
    measured = {name: value for name, value in config.flat().items() if leaves[name].measured}
    measured |= {
        "sample_n_frames": sampling.frames,
        "height": sampling.height,
        "width": sampling.width,
        "shift": sampling.shift,
        "sigmas": sampling.sigmas,
        "cfg_scale": sampling.guidance_scale,
        "low_noise_cfg_scale": sampling.low_noise_guidance_scale,
    }
    return measured | ({"validation_noise": sampling.noise} if sampling.noise else {})
