"""Recipes of Table 2 and the figures: reward setting, sampler, trust region, equalizer and KL schedule."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hyvideo.config.command_line import parse
from hyvideo.config.sections import TrustRegionSettings
from hyvideo.evaluation.studies.runs import Run, runs_of

SETTINGS = {"A": "averaged", "B": "alignment"}
METHODS = ("dance_grpo", "flow_grpo", "cps", "sage_grpo")  # in the order of the paper's table
# kl_weight 0 turns the KL term off regardless of the other flags.
KL_FLAGS = {
    "none": ["--kl_strategy", "flags", "--kl_weight", "0"],
    **{name: ["--kl_strategy", name] for name in ("fixed", "stepwise", "moving", "dual_moving", "dual_fixed")},
}
SCHEDULES = ("constant", "two_stage", "adaptive", "milder")  # of the KL coefficient; `milder_schedule` defines the last
CELL_FLAGS = ("reward_weights", "sde_type", "use_grad_balancing", "kl_strategy", "match_noise")

# Recipes that a figure compares; by default SAGE-GRPO with the dual moving KL.
TRAINED_FIGURES = {
    3: {"methods": list(METHODS), "kls": ["none"], "no_equalizer": True},
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
    schedule: str = ""  # one of SCHEDULES; empty for that of the config

    @property
    def name(self) -> str:
        method = re.sub(r"[^\w.]", "_", self.method)  # FILE.py:NAME becomes part of a folder's name
        parts = [self.setting, method, self.kl, "eq" if self.has_equalizer else "noeq", self.schedule]
        return "-".join(filter(None, parts))

    def flags(self, before: list[str]) -> list[str]:
        """Return the flags of the cell. They come last, so that --extra kl_weight does not enable a disabled KL."""
        flags = ["--reward_weights", SETTINGS[self.setting], "--sde_type", self.method]
        flags += ["--use_grad_balancing", str(self.has_equalizer).lower(), *KL_FLAGS[self.kl]]
        if self.schedule and any(word.partition("=")[0] == "--kl_schedule" for word in before):
            raise ValueError("--extra cannot set kl_schedule, which differs between the cells")
        if self.schedule:  # the reference's warm-up ends within the first updates and would make the schedules equal
            flags += ["--reference_conventions", "false"]
        if self.schedule == "milder":
            return flags + milder_schedule(parse(before + flags).config.trust_region)
        return flags + (["--kl_schedule", self.schedule] if self.schedule else [])


def grid(
    settings: Iterable[str],
    methods: Iterable[str],
    kls: Iterable[str],
    seeds: Iterable[int],
    *,
    no_equalizer: bool = False,
    schedules: Iterable[str] = ("",),
) -> list[Run]:
    """Return all runs of a grid of cells, seed by seed."""
    equalizer = (True, False) if no_equalizer else (True,)
    return runs_of(itertools.starmap(Cell, itertools.product(settings, methods, kls, equalizer, schedules)), seeds)


def runs_of_figure(figure: int, settings: Iterable[str], seeds: Iterable[int], **others: list[str] | None) -> list[Run]:
    """Return the runs of a figure; ``others`` override its defaults. Raises ValueError for unsuitable values."""
    others = {name: values for name, values in others.items() if values}
    if "schedules" in others and figure != 7:
        raise ValueError(f"--schedules applies only to figure 7, but --figures includes {figure}; remove one of them")
    if figure == 7 and "none" in others.get("kls", ()):
        raise ValueError("figure 7 compares schedules of the KL coefficient, but --kl none has no KL; choose another")
    chosen = {"methods": ["sage_grpo"], "kls": ["dual_moving"]} | TRAINED_FIGURES[figure] | others
    return grid(settings, seeds=seeds, **chosen)


def milder_schedule(trust: TrustRegionSettings) -> list[str]:
    """Return flags of the adaptive schedule with twice the warm-up and half the gain: never above ``two_stage``."""
    warmup, gain = 2 * trust.kl_warmup_updates, trust.kl_gain / 2
    return ["--kl_schedule", "adaptive", "--kl_warmup_updates", str(warmup), "--kl_gain", f"{gain:g}"]
