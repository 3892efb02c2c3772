"""Settings that must agree for a resumed run, an experiment and an evaluation; derived from the
settings' traits. And the files of code and weights that settings name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hyvideo.config.all_settings import TrustRegionSettings
from hyvideo.config.config import TRAITS, Config
from hyvideo.data.custom_code import code_files
from hyvideo.models.registry import family_files


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
    version = str(saved.get("transformer_version", Config().model.transformer_version))
    before = Config.of_version(version).flat() | dict(saved)
    for name, value in now.items():
        decides, was = TRAITS[name].decides, before[name]
        if decides == "start" or was == value:
            continue
        is_free = decides in ("machine", "records") or (decides == "layout" and same_rollouts)
        found = changes.free if is_free else changes.affecting_learning
        found[name] = f"{name} is {value!r} and was {was!r}"
    return changes


def code_of(settings: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Return the files of custom code that settings name: scorers, sampler, objective and family."""
    scorers = [] if settings["remote_reward_url"] else settings["reward_model"]
    named = {
        "reward_model": code_files(scorers),
        "sde_type": code_files([settings["sde_type"]]),
        "objective": code_files([settings["objective"]]),
        "family": family_files(settings["family"]),
    }
    return {name: files for name, files in named.items() if files}


def weights_of(settings: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Return the files of the initial LoRA and of the anchor. Raises ValueError if there are none."""
    from hyvideo.models.lora import lora_files  # imports torch

    named = {}
    if settings["pretrained_lora_path"]:
        named["pretrained_lora_path"] = lora_files(settings["pretrained_lora_path"])
    anchor = settings["anchor_path"]
    if anchor:
        digests = Path(anchor) / "digests.json"  # of all files of a checkpoint
        named["anchor_path"] = [digests] if digests.is_file() else lora_files(Path(anchor))
    return named


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
