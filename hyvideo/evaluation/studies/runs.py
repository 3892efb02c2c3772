"""Runs of a study: a recipe, which is a name and flags of post_train.py, and a seed.

    Run -> flags of post_train.py -> <out>/cells/<recipe>-seed0/

A run that has begun goes on where it stopped, and a finished one is not run again; one that was begun with other
settings is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyvideo.config.command_line import load_config, parse
from hyvideo.config.identity import experiment_settings
from hyvideo.config.settings import Config
from hyvideo.distributed.checkpoint import complete
from hyvideo.records.metrics_file import whole_lines

THREADS = ["--num_threads", "1"]  # several runs may share a machine
OF_A_RUN = ("config", "output_dir", "seed", "resume_from_checkpoint")


@dataclass(frozen=True)
class Recipe:
    """Flags of the runs of several seeds, under a name. A cell of Table 2 is a recipe that makes its own."""

    name: str
    words: tuple[str, ...]

    def flags(self, before: list[str]) -> list[str]:
        """Flags of post_train.py that make the recipe, after those ``before``, which all recipes have."""
        return [*self.words]


@dataclass(frozen=True)
class Run:
    """One training run of a study."""

    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-seed{self.seed}"


def runs_of(recipes: Iterable[Recipe], seeds: Iterable[int]) -> list[Run]:
    """All runs, seed by seed, so that a study that is stopped has whole tables of fewer seeds."""
    recipes = list(recipes)
    return list(dict.fromkeys(Run(recipe, seed) for seed in seeds for recipe in recipes))


@dataclass(frozen=True)
class Study:
    """Settings that the runs of a table have in common."""

    config_file: str
    out: Path
    extra: list[str] = field(default_factory=list)  # flags of post_train.py for every run
    num_gpus: int = 0  # processes of torchrun for each run; 0 is one process without it
    scorers: list[str] = field(default_factory=list)  # that measure in the end; those of the training by default

    def __post_init__(self) -> None:
        refuse_flags(self.extra, OF_A_RUN)

    @property
    def world_size(self) -> int:
        return max(1, self.num_gpus)

    def folder(self, run: Run) -> Path:
        return self.out / "cells" / run.name

    def flags(self, run: Run) -> list[str]:
        """The command line of post_train.py for a run, which goes on if it has begun."""
        flags = ["--config", self.config_file, "--output_dir", str(self.folder(run)), "--seed", str(run.seed)]
        flags += [*THREADS, "--report_to", "none", "--save_total_limit", "1"]
        if (self.folder(run) / "metrics.jsonl").is_file():
            flags += ["--resume_from_checkpoint", "latest"]
        flags += self.extra
        return flags + run.recipe.flags(flags)

    def config(self, run: Run) -> Config:
        """Settings of a run. Ends the program with one message for a flag that does not exist."""
        return parse(self.flags(run)).config

    def evaluation_config(self) -> Config:
        """Settings of the world, its validation and its scorers, without those of any run.

        It computes with as many threads as a run: another number rounds otherwise, and a pixel falls to the other byte.
        """
        flags = ["--config", self.config_file, "--output_dir", str(self.out), *THREADS, *self.extra]
        return parse([*flags, "--reward_model", *self.scorers] if self.scorers else flags).config


def refuse_flags(words: Iterable[str], names: Iterable[str]) -> None:
    """Raises ValueError for a flag of every run that must differ between runs."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")  # flags may have either
        if word.startswith("--") and name in names:
            raise ValueError(
                f"what all runs share cannot set {name}, which differs between the runs or belongs to them"
            )


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    saved: int  # iteration of its newest checkpoint, after which it goes on; 0 without one
    checkpoint: Path | None  # of the last iteration of all: the run is finished

    @property
    def is_finished(self) -> bool:
        return self.checkpoint is not None


def progress(folder: Path, config: Config) -> Progress:
    """Progress of the run in a folder. ValueError where it began with other settings or is past ``max_steps``."""
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
