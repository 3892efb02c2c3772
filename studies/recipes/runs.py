"""Runs of a study: a recipe (a name and flags of post_train.py) and a seed.

    RecipeRun -> flags of post_train.py -> <out>/cells/<recipe>-seed0/

Interrupted runs are resumed and finished runs are not repeated. Runs started with other settings
raise ValueError.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyvideo.checkpoints.format import complete
from hyvideo.files.run_folder import METRICS, read_record
from hyvideo.records.metrics_file import complete_lines
from hyvideo.settings.command_line import parse, read_settings
from hyvideo.settings.config import Config
from hyvideo.settings.identity import experiment_settings
from hyvideo.settings.run_inputs import RunInputs

CELLS = "cells"  # folder of the runs, in the output folder of a study
THREADS = ["--num_threads", "1"]  # several runs may share a machine
RUN_FLAGS = ("config", "output_dir", "seed", "resume_from_checkpoint")


@dataclass(frozen=True)
class Recipe:
    """Named flags for runs of several seeds.

    A cell of Table 2 is a recipe that derives its flags.
    """

    name: str
    words: tuple[str, ...]
    control_of: str = ""  # name of the recipe that this one repeats without the reward

    def flags(self, before: list[str]) -> list[str]:
        """Return the recipe's flags of post_train.py, which follow those ``before`` that all
        recipes share.
        """
        return list(self.words)


@dataclass(frozen=True)
class RecipeRun:
    """One training run of a study."""

    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-seed{self.seed}"


def runs_of(recipes: Iterable[Recipe], seeds: Iterable[int]) -> list[RecipeRun]:
    """Return all runs, seed by seed, so that an interrupted study has complete tables of fewer
    seeds.
    """
    recipes = list(recipes)
    return list(dict.fromkeys(RecipeRun(recipe, seed) for seed in seeds for recipe in recipes))


@dataclass(frozen=True)
class RecipeStudy:
    """Settings that the runs of a study share."""

    config_file: str
    out: Path
    extra: list[str] = field(default_factory=list)  # flags of post_train.py for every run
    num_gpus: int = 0  # processes of torchrun for each run; 0 for one process without torchrun
    # for the evaluation; those of training by default
    scorers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        reject_flags(self.extra, RUN_FLAGS)

    @property
    def world_size(self) -> int:
        return max(1, self.num_gpus)

    def folder(self, run: RecipeRun) -> Path:
        return self.out / CELLS / run.name

    def flags(self, run: RecipeRun) -> list[str]:
        """Return the flags of post_train.py for a run, which resume it if it was started."""
        flags = [
            "--config",
            self.config_file,
            "--output_dir",
            str(self.folder(run)),
            "--seed",
            str(run.seed),
        ]
        flags += [*THREADS, "--report_to", "none", "--save_total_limit", "1"]
        flags += self.extra
        return flags + run.recipe.flags(flags)

    def config(self, run: RecipeRun) -> Config:
        """Return the settings of a run. Exits with an error message for an unknown flag."""
        return parse(self.flags(run)).config

    def evaluation_config(self) -> Config:
        """Return the settings of model, validation and scorers, without the settings of any run.

        The number of threads is as in the runs, since another number can change pixels by
        rounding.
        """
        flags = ["--config", self.config_file, "--output_dir", str(self.out), *THREADS, *self.extra]
        if self.scorers:
            flags += ["--reward_model", *self.scorers]
        return parse(flags).config


def reject_flags(words: Iterable[str], names: Iterable[str]) -> None:
    """Raise ValueError if the words contain a flag of ``names``, which the study sets for each
    run.
    """
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")  # flags may have - or _
        if word.startswith("--") and name in names:
            raise ValueError(
                f"shared flags and recipes cannot set {name}, which the study sets for each run"
            )


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run."""

    saved: int  # iteration of its newest checkpoint, from which it resumes; 0 without one
    checkpoint: Path | None  # of the last iteration, if the run is finished

    @property
    def is_finished(self) -> bool:
        return self.checkpoint is not None


def progress(folder: Path, config: Config) -> RunProgress:
    """Return the progress of the run in a folder.

    Raises ValueError if it was started with other settings or has more iterations than
    ``max_steps``.
    """
    metrics = folder / METRICS
    lines = complete_lines(metrics) if metrics.is_file() else []
    if not lines:
        return RunProgress(0, None)
    # with a custom objective too, whose file the study has
    started = experiment_settings(
        Config.from_flat(read_settings(folder / "config.yaml")).resolved()
    )
    requested = experiment_settings(config)
    names = [name for name in {**started, **requested} if started.get(name) != requested.get(name)]
    if names:
        changes = ", ".join(
            f"{name} {started.get(name)!r} instead of {requested.get(name)!r}" for name in names
        )
        raise ValueError(
            f"{folder} was started with {changes}; use another --output_dir or move the folder"
        )
    last = lines[-1][0]
    max_steps = config.optimizer.max_steps
    if last > max_steps:
        raise ValueError(
            f"{folder} has {last} iterations, more than max_steps {max_steps}; use another "
            "--output_dir"
        )
    saved = {int(path.name): path for path in complete(folder)}
    if saved:
        _check_inputs(folder, config)
    # A line is written before the checkpoint: a last line without a checkpoint means that the run
    # stopped in between.
    final = saved.get(max_steps) if last == max_steps else None
    return RunProgress(max(saved, default=0), final)


def _check_inputs(folder: Path, config: Config) -> None:
    """Raise ValueError if a file that affects training has changed since the run started, because
    the other runs of the study would train on something else.
    """
    from hyvideo.loading.input_digests import MODELS, changed_inputs, digest_inputs
    from hyvideo.models.loading import find_transformer  # imports torch, like the next

    record = read_record(folder)
    model = config.model
    # a table can be made where the weights are missing
    if not record or not find_transformer(model.pretrained_model_root, model.transformer_version):
        return
    kinds = [name.removeprefix(MODELS) for name in record.inputs if name.startswith(MODELS)]
    changed = changed_inputs(record.inputs, digest_inputs(config, RunInputs(config), kinds))
    if changed:
        raise ValueError(
            f"the contents of {', '.join(changed)} have changed since the run in {folder} started; "
            "restore them, or use another --output_dir"
        )


def finished(study: RecipeStudy, runs: Iterable[RecipeRun]) -> dict[RecipeRun, Path]:
    """Return the last checkpoint of each finished run."""
    checkpoints = {run: progress(study.folder(run), study.config(run)).checkpoint for run in runs}
    return {run: checkpoint for run, checkpoint in checkpoints.items() if checkpoint}
