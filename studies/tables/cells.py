"""Recipes of Table 2 and the figures: reward setting, sampler, trust region, equalizer and KL
schedule.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hyvideo.schedulers.transitions import sampler_of
from hyvideo.settings.command_line import parse
from studies.recipes.runs import RecipeRun, runs_of

SETTINGS = {"A": "averaged", "B": "alignment"}
METHODS = ("dance_grpo", "flow_grpo", "cps", "sage_grpo")  # in the order of the paper's table
KL_FLAGS = {
    "none": ["--kl_strategy", "none", "--kl_weight", "0"],
    **{
        name: ["--kl_strategy", name]
        for name in ("fixed", "stepwise", "moving", "dual_moving", "dual_fixed")
    },
}
CELL_FLAGS = ("reward_weights", "sde_type", "use_grad_balancing", "kl_strategy")
FIGURES = {  # recipes that a figure compares; by default SAGE-GRPO with the dual moving KL
    3: {"methods": METHODS, "kls": ["none"], "no_equalizer": True},
    7: {"schedules": ["constant", "two_stage", "milder"]},
    8: {"kls": ["none", "fixed", "stepwise", "moving", "dual_moving"]},
}


@dataclass(frozen=True)
class Cell:
    """A recipe of Table 2 or of a figure."""

    setting: str
    method: str
    kl: str
    has_equalizer: bool
    schedule: str = ""  # of the KL coefficient, in figure 7; empty: as in the config

    @property
    def name(self) -> str:
        method = re.sub(r"[^\w.]", "_", self.method)  # FILE.py:NAME becomes part of a folder's name
        equalizer = "eq" if self.has_equalizer else "noeq"
        parts = [self.setting, method, self.kl, equalizer, self.schedule]
        return "-".join(filter(None, parts))

    @property
    def labels(self) -> tuple[str, str, str]:
        """Sampler, trust region and equalizer in words."""
        kl = "no KL" if self.kl == "none" else f"{self.kl.replace('_', ' ')} KL"
        equalizer = "equalizer" if self.has_equalizer else "no equalizer"
        return sampler_of(self.method).label, kl, equalizer

    def flags(self, before: list[str]) -> list[str]:
        """Return the flags of the cell.

        They come last, so that --extra kl_weight does not enable a disabled KL.
        """
        flags = ["--reward_weights", SETTINGS[self.setting], "--sde_type", self.method]
        flags += ["--use_grad_balancing", str(self.has_equalizer).lower(), *KL_FLAGS[self.kl]]
        # the reference's warm-up ends within the first updates and would make the schedules equal
        if self.schedule:
            flags += ["--reference_conventions", "false"]
            flags += ["--kl_schedule", "adaptive" if self.schedule == "milder" else self.schedule]
        if self.schedule == "milder":  # twice the warm-up: never above two_stage
            trust = parse(before + flags).config.objective
            flags += ["--kl_warmup_updates", str(2 * trust.kl_warmup_updates)]
        return flags


def grid(
    settings: Iterable[str],
    methods: Iterable[str],
    kls: Iterable[str],
    seeds: Iterable[int],
    *,
    no_equalizer: bool = False,
    schedules: Iterable[str] = ("",),
) -> list[RecipeRun]:
    """Return all runs of a grid of cells, seed by seed."""
    equalizer = (True, False) if no_equalizer else (True,)
    return runs_of(
        itertools.starmap(Cell, itertools.product(settings, methods, kls, equalizer, schedules)),
        seeds,
    )


def runs_of_figure(
    figure: int, settings: Iterable[str], seeds: Iterable[int], **chosen: list[str] | None
) -> list[RecipeRun]:
    """Return the runs of a figure; ``chosen`` replaces its methods and kls."""
    chosen = {name: values for name, values in chosen.items() if values}
    default = {"methods": ["sage_grpo"], "kls": ["dual_moving"]}
    return grid(settings, seeds=seeds, **default | FIGURES[figure] | chosen)
