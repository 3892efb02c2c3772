"""The built-in objectives, and custom ones from a file: ``--objective FILE.py:NAME``.

This file must not import torch, because the rules between settings import it first. The classes are
imported only where a run uses them; the file of a custom one also where its settings are checked or
planned.
"""

import inspect
import pkgutil
import re
from typing import Literal, NamedTuple

from hyvideo.data.custom_code import load_object

# First parts of the names of metrics that the run itself reports.
RESERVED_GROUPS = (
    "advantage anchor by_step cost grad hacking memory perf reward time update validation".split()
)


class Traits(NamedTuple):
    """Properties of an objective that settings and plan depend on: attributes of its class
    (`Objective`).
    """

    # stochastic steps, all steps of an ODE rollout, or noise levels
    trains: Literal["steps", "path", "levels"]
    has_ratio: bool = False  # the loss has likelihood ratios
    needs_old_velocities: bool = False  # later updates need the rollout policy's velocities
    uses_pairs: bool = False  # it trains on rated pairs of videos instead of rollouts
    needs_rewards: bool = True  # rollouts are decoded and scored


class Entry(NamedTuple):
    """A built-in objective."""

    class_path: str  # module:class
    label: str  # in reports
    traits: Traits  # equal to the attributes of the class, for programs that do not import torch


OBJECTIVES = {
    "grpo": Entry("hyvideo.training.objectives.grpo:GRPO", "GRPO", Traits("steps", has_ratio=True)),
    "dpo": Entry("hyvideo.training.objectives.dpo:DPO", "DPO", Traits("levels", uses_pairs=True)),
    "nft": Entry(
        "hyvideo.training.objectives.nft:NFT",
        "DiffusionNFT",
        Traits("levels", needs_old_velocities=True),
    ),
    "draft": Entry("hyvideo.training.objectives.draft:Draft", "reward gradients", Traits("levels")),
    "distill": Entry(
        "hyvideo.training.objectives.distill:Distill",
        "Step distillation",
        Traits("path", needs_rewards=False),
    ),
}


def traits_of(name: str) -> Traits:
    """Return the traits of an objective. Raises ValueError as `objective_class` does."""
    if name in OBJECTIVES:
        return OBJECTIVES[name].traits
    cls = objective_class(name)
    return Traits(*(getattr(cls, trait) for trait in Traits._fields))


def label_of(name: str) -> str:
    """Return the name of an objective in reports: NAME of ``FILE.py:NAME``."""
    return OBJECTIVES[name].label if name in OBJECTIVES else name.rpartition(":")[2]


def objective_class(name: str) -> type:
    """Return the class of an objective, built-in or in a file that is imported once.

    Raises ValueError if invalid.
    """
    if name in OBJECTIVES:
        return pkgutil.resolve_name(OBJECTIVES[name].class_path)
    if ":" not in name:
        raise ValueError(
            f"objective must be one of {', '.join(OBJECTIVES)} or FILE.py:NAME, got {name!r}"
        )
    return _custom_class(name)


def _custom_class(name: str) -> type:
    place = f"objective {name}"
    found = load_object(name, "objective")
    if not isinstance(found, type) or getattr(found, "trains", None) not in (
        "steps",
        "path",
        "levels",
    ):
        raise ValueError(
            f"{place} must name a class that inherits from StepObjective or LevelObjective of "
            f"hyvideo.training.objective, got {found!r:.80}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(
            f"{place} must be a class with all methods of an objective, got one without {missing}"
        )
    _check_names(place, found)
    _check_traits(place, found)
    return found


def _check_traits(place: str, cls: type) -> None:
    """Raise ValueError if the traits of the class contradict one another."""
    for name in (*Traits._fields[1:], "uses_advantages", "keeps_all_latents"):
        if not isinstance(value := getattr(cls, name), bool):
            raise ValueError(f"{place} needs True or False as `{name}`, got {value!r:.80}")
    if cls.uses_advantages and not cls.needs_rewards:
        raise ValueError(
            f"{place} has uses_advantages True, but without rewards (needs_rewards False) all "
            "advantages are 0 and every update would be skipped; set uses_advantages False"
        )
    if cls.has_ratio and cls.trains != "steps":
        raise ValueError(
            f"{place} has has_ratio True, but trains {cls.trains}, which have no likelihood; "
            "inherit from StepObjective, or set has_ratio False"
        )


def _check_names(place: str, cls: type) -> None:
    """Raise ValueError if the names of the class's metrics cannot be used."""
    names = getattr(cls, "metrics", None)
    if (
        not isinstance(names, tuple)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"{place} needs a tuple of names as `metrics`, such as ('loss/total',), got "
            f"{names!r:.80}"
        )
    deviations = getattr(cls, "deviation_names", None)
    if not isinstance(deviations, tuple) or len(deviations) != 2:
        raise ValueError(f"{place} needs two names as `deviation_names`, got {deviations!r:.80}")
    for name in (*names, *deviations):
        if not re.fullmatch(r"\w+(/\w+)+", name):
            raise ValueError(
                f"{place} needs metrics with names such as loss/total, got {name!r:.80}"
            )
        if name == "kl/coef" or name.partition("/")[0] in RESERVED_GROUPS:
            raise ValueError(
                f"{place} cannot report the metric {name}, which the run itself reports; rename it"
            )
    repeated = sorted(
        {name for name in (*names, *deviations) if (*names, *deviations).count(name) > 1}
    )
    if repeated:
        raise ValueError(f"{place} must name each metric once, got {', '.join(repeated)} twice")
    if unknown := [name for name in cls.by_step if name not in names]:
        raise ValueError(
            f"{place} lists {', '.join(unknown)} in `by_step` but not in `metrics`; add the name "
            "there"
        )
    if cls.by_step and cls.trains == "levels":
        raise ValueError(
            f"{place} trains noise levels, so no metric can be reported by step; remove `by_step`"
        )
