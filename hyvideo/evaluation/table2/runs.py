"""Runs of Table 2 and the figures: reward setting, sampler, trust region, with the equalizer or not, schedule, seed.

    TableRun -> flags of post_train.py -> <out>/cells/A-sage_grpo-none-eq-seed0/

A run that has begun goes on where it stopped, and a finished one is not run again; one that was begun with other
settings is refused.
"""

import itertools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyvideo.config.command_line import load_config, parse
from hyvideo.config.identity import experiment_settings
from hyvideo.config.sections import TrustRegionSettings
from hyvideo.config.settings import Config
from hyvideo.distributed.checkpoint import complete
from hyvideo.records.metrics_file import whole_lines

SETTINGS = {"A": "averaged", "B": "alignment"}
METHODS = {"dance_grpo": "DanceGRPO", "flow_grpo": "FlowGRPO", "cps": "CPS", "sage_grpo": "SAGE-GRPO"}
# kl_weight 0 turns the term off whatever the flags of the strategy say.
KL_FLAGS = {
    "none": ["--kl_strategy", "flags", "--kl_weight", "0"],
    **{name: ["--kl_strategy", name] for name in ("fixed", "stepwise", "moving", "dual_moving", "dual_fixed")},
}
SCHEDULES = ("constant", "two_stage", "adaptive", "milder")  # of the KL coefficient; the last is `milder_schedule`
THREADS = ["--num_threads", "1"]  # several runs may share a machine
RUN_FLAGS = (
    "config output_dir seed reward_weights sde_type use_grad_balancing kl_strategy match_noise resume_from_checkpoint"
).split()


@dataclass(frozen=True)
class TableRun:
    """One training run of the table, or of a figure."""

    setting: str
    method: str
    kl: str
    has_equalizer: bool
    seed: int
    schedule: str = ""  # one of SCHEDULES; that of the config by default

    @property
    def name(self) -> str:
        parts = [self.setting, self.method, self.kl, "eq" if self.has_equalizer else "noeq", self.schedule]
        return "-".join([*filter(None, parts), f"seed{self.seed}"])


def grid(
    settings: Iterable[str],
    methods: Iterable[str],
    kls: Iterable[str],
    seeds: Iterable[int],
    *,
    no_equalizer: bool = False,
    schedules: Iterable[str] = ("",),
) -> list[TableRun]:
    """All runs, seed by seed, so that a study that is stopped has whole tables of fewer seeds."""
    equalizer = (True, False) if no_equalizer else (True,)
    combinations = itertools.product(seeds, settings, methods, kls, equalizer, schedules)
    runs = [
        TableRun(setting, method, kl, has_equalizer, seed, schedule)
        for seed, setting, method, kl, has_equalizer, schedule in combinations
    ]
    return list(dict.fromkeys(runs))


def milder_schedule(trust: TrustRegionSettings) -> list[str]:
    """Flags of the adaptive rule with twice the warm-up and half the gain of the settings.

    Its coefficient is at no update above that of ``two_stage``, which is at none above ``constant``.
    """
    warmup, gain = 2 * trust.kl_warmup_updates, trust.kl_gain / 2
    return ["--kl_schedule", "adaptive", "--kl_warmup_updates", str(warmup), "--kl_gain", f"{gain:g}"]


@dataclass(frozen=True)
class Study:
    """Settings that the runs of a table have in common.

    Args:
        extra: Flags of post_train.py for every run.
        match_noise: ``sde_type:eta`` whose total noise every sampler is given; empty for none.
        num_gpus: Processes of torchrun for each run; 0 is one process without it.
        scorers: Scorers that measure the runs in the end; by default those that they were trained with.
    """

    config_file: str
    out: Path
    extra: list[str] = field(default_factory=list)
    match_noise: str = ""
    num_gpus: int = 0
    scorers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for word in self.extra:
            name = word.removeprefix("--").partition("=")[0].replace("-", "_")  # flags may have either
            if word.startswith("--") and name in RUN_FLAGS:
                raise ValueError(f"--extra cannot set {name}, which differs between the cells or belongs to them")

    def folder(self, run: TableRun) -> Path:
        return self.out / "cells" / run.name

    def flags(self, run: TableRun) -> list[str]:
        """The command line of post_train.py for a run, which goes on if it has begun."""
        flags = ["--config", self.config_file, "--output_dir", str(self.folder(run)), "--seed", str(run.seed)]
        flags += ["--reward_weights", SETTINGS[run.setting], "--sde_type", run.method]
        flags += ["--use_grad_balancing", str(run.has_equalizer).lower()]
        flags += [*THREADS, "--report_to", "none", "--save_total_limit", "1"]
        if self.match_noise:
            flags += ["--match_noise", self.match_noise]
        if (self.folder(run) / "metrics.jsonl").is_file():
            flags += ["--resume_from_checkpoint", "latest"]
        # The trust region last: an extra kl_weight is of the runs that have one, and gives none to those without.
        flags = flags + self.extra + KL_FLAGS[run.kl]
        if run.schedule and any(word.partition("=")[0] == "--kl_schedule" for word in self.extra):
            raise ValueError("--extra cannot set kl_schedule, which differs between the cells")
        if run.schedule == "milder":
            return flags + milder_schedule(parse(flags).config.trust_region)
        return flags + (["--kl_schedule", run.schedule] if run.schedule else [])

    def config(self, run: TableRun) -> Config:
        """Settings of a run. Ends the program with one message for a flag that does not exist."""
        return parse(self.flags(run)).config

    def evaluation_config(self) -> Config:
        """Settings of the world, its validation and its scorers, without those of any run.

        It computes with as many threads as a run: another number rounds otherwise, and a pixel falls to the other byte.
        """
        flags = ["--config", self.config_file, "--output_dir", str(self.out), *THREADS, *self.extra]
        return parse([*flags, "--reward_model", *self.scorers] if self.scorers else flags).config


def split_extra(text: str) -> list[str]:
    """Flags of post_train.py from ``"max_steps 30 eta 0.5"`` or ``"--max_steps 30 --eta 0.5"``."""
    words = shlex.split(text)
    if not words or words[0].startswith("--"):
        return words
    if len(words) % 2:
        raise ValueError(f"--extra takes pairs of a flag and a value, or flags with their dashes, got {text!r}")
    return [word for name, value in zip(words[::2], words[1::2]) for word in (f"--{name}", value)]


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    saved: int  # iteration of its newest checkpoint, after which it goes on; 0 without one
    checkpoint: Path | None  # of the last iteration of all: the run is finished

    @property
    def is_finished(self) -> bool:
        return self.checkpoint is not None


def progress(folder: Path, config: Config) -> Progress:
    """Progress of the run in a folder, by its metrics and checkpoints.

    Raises: ValueError for a run that was begun with other settings, or that went further than ``max_steps``.
    """
    metrics = folder / "metrics.jsonl"
    lines = whole_lines(metrics) if metrics.is_file() else []
    if not lines:
        return Progress(0, None)
    begun = experiment_settings(load_config(folder / "config.yaml"))
    wanted = experiment_settings(config)
    if names := [name for name in {**begun, **wanted} if begun.get(name) != wanted.get(name)]:
        changes = ", ".join(f"{name} {begun.get(name)!r} and not {wanted.get(name)!r}" for name in names)
        raise ValueError(f"{folder} was begun with {changes}; take another --out, or move it away")
    last, max_steps = lines[-1][0], config.optimizer.max_steps
    if last > max_steps:
        raise ValueError(f"{folder} has {last} iterations, more than max_steps {max_steps}; take another --out")
    saved = {int(path.name): path for path in complete(folder)}
    # A line is written before the checkpoint: a last line without it is of a run that stopped in between.
    return Progress(max(saved, default=0), saved.get(max_steps) if last == max_steps else None)
