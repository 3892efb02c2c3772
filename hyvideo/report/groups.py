"""What the runs of a page have in common: the reward, a recipe with several seeds, a sweep, and the
settings.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from hyvideo.config.config import TRAITS, Config
from hyvideo.config.identity import experiment_settings

SEED = re.compile(r"[-_. ]?seed[-_=]?\d+$", re.IGNORECASE)  # end of a run's name
CELLS = "cells"  # folder of the runs that a study trains, in its output folder
# settings that name a run instead of describing it
NOT_COMPARED = ("output_dir", "seed", "resume_from_checkpoint")


def reward_of(config: Config) -> str:
    """Return the trained reward as text: runs with different texts have rewards that cannot share
    an axis.
    """
    weights = ", ".join(
        f"{name} {weight:g}" for name, weight in config.reward_weights.items() if weight
    )
    options = f", options {config.reward.reward_config}" if config.reward.reward_config else ""
    normalized = ", normalized in groups" if config.reward.reward_normalization == "group" else ""
    return f"{' + '.join(config.reward.reward_model)}: {weights}{options}{normalized}"


def sweep_of(folder: Path) -> Path | None:
    """Return the output folder of the study that trained the run in ``folder``; None for any other
    run.
    """
    return folder.parent.parent if folder.parent.name == CELLS else None


def seed_groups(configs: Mapping[str, Config], folders: Mapping[str, Path]) -> dict[str, str]:
    """Return a group for each run. The runs of a group differ only in seed, machine and records.

    A group is named by its runs without their seeds. Two groups of one name get a number.
    """
    members: dict[tuple, list[str]] = {}
    for name, config in configs.items():
        settings = {
            key: value
            for key, value in experiment_settings(config).items()
            if key not in NOT_COMPARED
        }
        key = (sweep_of(folders[name]), repr(sorted(settings.items(), key=lambda item: item[0])))
        members.setdefault(key, []).append(name)
    found: dict[str, str] = {}
    for names in members.values():
        stems = dict.fromkeys(SEED.sub("", name) for name in names)
        base = label = next(iter(stems)) if len(stems) == 1 else names[0]
        number = 1
        while label in found.values():
            number += 1
            label = f"{base} ({number})"
        found |= dict.fromkeys(names, label)
    return {name: found[name] for name in configs}


def differing_settings(configs: Mapping[str, Config]) -> list[str]:
    """Return the settings that have several values among the runs, also the seed; first those that
    affect learning.
    """
    flats = [config.flat() for config in configs.values()]
    names = [name for name in flats[0] if name != "output_dir"] if flats else []
    found = [name for name in names if len({str(flat[name]) for flat in flats}) > 1]
    return sorted(found, key=lambda name: TRAITS[name].decides != "learning")


def setting_text(value: object) -> str:
    """Return the value of a setting as text."""
    if value is None or value == "" or value == []:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value))
    return str(value)
