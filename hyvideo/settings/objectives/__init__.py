"""Settings of the objectives: each has those that it reads, and no others exist for it.

``Config.objective`` is one of them, chosen by the setting ``objective``. A file of this folder has
the settings of a built-in objective and the facts that the rest of the program asks for; its loss is
the file of the same name in `training.objectives`. A custom objective has the settings of the
built-in one that trains the same (steps, a path, or noise levels), and those that its class declares
in ``Settings``. Imports no torch, except for a custom objective.
"""

import pkgutil
from functools import cache

from pydantic import create_model

from hyvideo.files.custom_code import load_object
from hyvideo.files.text import nearest, quote
from hyvideo.settings.objectives.base import ObjectiveSettings
from hyvideo.settings.objectives.distill import DistillSettings
from hyvideo.settings.objectives.dpo import DPOSettings
from hyvideo.settings.objectives.draft import DraftSettings
from hyvideo.settings.objectives.grpo import GRPOSettings
from hyvideo.settings.objectives.nft import NFTSettings
from hyvideo.settings.objectives.sft import SFTSettings

# First parts of the names of metrics that the run itself reports.
RESERVED_GROUPS = (
    "advantage anchor by_step cost grad hacking iteration lr memory perf quantiles reward time update "
    "validation"
).split()

_ALL = (GRPOSettings, NFTSettings, DraftSettings, DPOSettings, SFTSettings, DistillSettings)
BUILT_IN = {each.name: each for each in _ALL}
DEFAULT = GRPOSettings.name
# Attributes that the class of a custom objective has as well.
_TRAITS = ("trains", "has_ratio", "needs_old_velocities", "needs_rewards")
# The settings of a custom objective that inherits from no built-in one, by what it trains.
LIKE = {"steps": GRPOSettings, "levels": NFTSettings, "path": DistillSettings}


def label_of(name: str) -> str:
    """Return the name of an objective in reports, also of one whose file has moved."""
    return BUILT_IN[name].label if name in BUILT_IN else name.rpartition(":")[2]


def settings_class(name: str) -> type[ObjectiveSettings]:
    """Return the settings of an objective, built-in or ``FILE.py:NAME``.

    Raises ValueError as `objective_class` does.
    """
    return BUILT_IN[name] if name in BUILT_IN else _custom_settings(name)


def objective_class(name: str) -> type:
    """Return the class of an objective, built-in or in a file that is imported once.

    Raises ValueError if invalid.
    """
    if name in BUILT_IN:
        return pkgutil.resolve_name(BUILT_IN[name].class_path)
    if ":" not in name:
        raise ValueError(
            f"objective must be one of {', '.join(BUILT_IN)} or FILE.py:NAME, got {quote(name, 80)}; "
            f"{nearest(name, BUILT_IN) or 'correct the name'}"
        )
    found = load_object(name, "objective")
    if getattr(found, "trains", None) not in LIKE:
        raise ValueError(
            f"objective {name} must name a class that inherits from StepObjective or LevelObjective "
            f"of hyvideo.training.objective, got {found!r:.80}"
        )
    names = getattr(found, "metrics", None)
    if not isinstance(names, tuple | list):
        raise ValueError(
            f"objective {name} must list the names of its metrics in `metrics`, such as "
            f'("loss/total",), got {names!r:.80}'
        )
    reserved = [each for each in names if each.partition("/")[0] in RESERVED_GROUPS]
    if reserved:
        raise ValueError(
            f"objective {name} cannot report {', '.join(reserved)}, which the run itself reports; "
            "rename it"
        )
    return found


@cache
def _custom_settings(name: str) -> type[ObjectiveSettings]:
    """Return the settings of a custom objective: those of the built-in one that it inherits from or
    that trains the same, and those in ``Settings`` of its class, a `Section`.
    """
    cls = objective_class(name)
    paths = {each.class_path: each for each in _ALL}
    bases = (f"{base.__module__}:{base.__name__}" for base in cls.__mro__)
    inherited = next((paths[base] for base in bases if base in paths), None)
    like = inherited or LIKE[cls.trains]
    defaults = inherited or ObjectiveSettings
    own = getattr(cls, "Settings", None)
    settings = create_model(cls.__name__, __base__=(own, like) if own else like)
    settings.name = name
    settings.label = label_of(name)
    for trait in _TRAITS:
        setattr(settings, trait, getattr(cls, trait, getattr(defaults, trait, None)))
    return settings
