"""Settings that must agree for a resumed run, an experiment and an evaluation; derived from the
settings' traits.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hyvideo.config.all_settings import TrustRegionSettings
from hyvideo.config.command_line import reward_options
from hyvideo.config.config import TRAITS, Config, is_json
from hyvideo.config.reference_flags import with_current_names
from hyvideo.data.custom_code import code_files
from hyvideo.data.files import find_path
from hyvideo.models.registry import family_files


class Changes(NamedTuple):
    """Descriptions of settings that differ from the checkpoint that a run resumes from."""

    free: list[str]  # may change
    affecting_learning: list[str]  # need allow_changed_settings


def changed_settings(
    saved: Mapping[str, object], now: Mapping[str, object], *, same_rollouts: bool
) -> Changes:
    """Compare the settings of a checkpoint, as read from JSON, with the current ones; absent ones
    had their default.

    With ``same_rollouts``, the number of rollouts per iteration is unchanged, so that their layout
    may change.
    """
    free: list[str] = []
    affecting_learning: list[str] = []
    version = str(saved.get("transformer_version", Config().model.transformer_version))
    before = Config.of_version(version).flat() | with_current_names(saved)
    # a kl_weight of 0 is kl_strategy none in both
    for name, value in with_current_names(now).items():
        decides, was = TRAITS[name].decides, before[name]
        # A matched eta may differ in its last bit between releases.
        is_rounded = (
            name == "eta"
            and isinstance(was, int | float)
            and math.isclose(was, value, rel_tol=1e-12)
        )
        if decides == "start" or was == value or is_rounded:
            continue
        is_free = decides in ("machine", "records") or (decides == "layout" and same_rollouts)
        sentence = f"{name} is {value!r} and was {was!r}"
        (free if is_free else affecting_learning).append(sentence)
    return Changes(free, affecting_learning)


def named_files(settings: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Return the files that settings name: prompts, initial LoRA, code of sampler, objective and
    scorers, options.
    """
    from hyvideo.models.lora import lora_files  # imports torch

    options, lora = settings["reward_config"], settings["pretrained_lora_path"]
    named = {name: settings[name] for name in ("prompts_csv", "valid_video_csv", "pairs_csv")}
    if Config().with_settings(objective=settings["objective"]).uses_pairs:
        named["prompts_csv"] = []
    named["reward_config"] = [options] if options and not is_json(options) else []
    for scorer_options in reward_options(Config().with_settings(**settings).reward).values():
        values = [
            value
            for name, value in scorer_options.items()
            if name != "path" and isinstance(value, str)
        ]
        named["reward_config"] += [value for value in values if os.path.isfile(find_path(value))]
    named["reward_model"] = (
        [] if settings["remote_reward_url"] else code_files(settings["reward_model"])
    )
    named["sde_type"] = code_files([settings["sde_type"]])
    named["objective"] = code_files([settings["objective"]])
    named["family"] = family_files(settings.get("family", ""))
    named["pretrained_lora_path"] = lora_files(lora) if lora else []
    named["anchor_path"] = (
        _anchor_files(Path(settings["anchor_path"])) if settings["anchor_path"] else []
    )
    return {name: [find_path(path) for path in paths] for name, paths in named.items() if paths}


def _anchor_files(path: Path) -> list[Path]:
    """Return the files by whose contents an anchor is known: a LoRA's files, or the manifest of a
    checkpoint.
    """
    from hyvideo.models.lora import lora_files  # imports torch

    manifest = path / "manifest.json"  # has the hashes of all files of a checkpoint
    return [manifest] if manifest.is_file() else lora_files(path)


def experiment_settings(config: Config) -> dict[str, object]:
    """Return the settings that affect learning; without KL terms, ``kl_strategy`` alone for the
    trust region.
    """
    settings = {
        name: value
        for name, value in config.flat().items()
        if TRAITS[name].decides in ("learning", "layout")
    }
    if config.kl_strategy == "none":
        for name in TrustRegionSettings.__dataclass_fields__.keys() & settings.keys():
            del settings[name]
    return settings | {"kl_strategy": config.kl_strategy}


def evaluation_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings, except paths, that affect an evaluation; frames, size and shift are
    those of validation.
    """
    config = Config().with_settings(**settings).sampled_as_validation()
    measured = {name: value for name, value in config.flat().items() if TRAITS[name].measured}
    return measured | (
        {"validation_noise": config.validation_noise} if config.validation_noise else {}
    )
