"""Curves of several runs from their metrics.jsonl, averaged over the seeds of equal settings."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyvideo.files.files import folder_problem
from hyvideo.records.metrics_file import read_metrics
from hyvideo.settings.command_line import config_of_run
from hyvideo.settings.identity import experiment_settings

Settings = tuple[tuple[str, object], ...]  # names and values


class MissingRuns(Exception):
    """Raised with the reason why a figure cannot be drawn."""


@dataclass(frozen=True)
class LoggedRun:
    """A training run, read from its folder."""

    folder: Path
    # settings that affect training, without the seed; kl_strategy is resolved; hashable values
    settings: dict
    lines: list[dict]  # of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """A metric over the iterations that all runs have."""

    iterations: np.ndarray  # (points,)
    mean: np.ndarray  # (points,)
    std: np.ndarray  # (points,), over the runs; 0 for one run


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the compared settings and in their seeds."""

    label: str  # settings that differ between the comparisons
    variants: dict[str, list[LoggedRun]]  # by the compared settings that differ


def find_runs(folders: Iterable[Path]) -> list[LoggedRun]:
    """Return the runs that the folders are or contain.

    Raises ValueError for a folder without runs.
    """
    runs = {}
    for folder in folders:
        paths = [folder]
        if not (folder / "metrics.jsonl").is_file():
            paths = sorted(path.parent for path in folder.rglob("metrics.jsonl"))
        paths = [path for path in paths if (path / "config.yaml").is_file()]
        if not paths:
            problem = folder_problem(folder) or "found no metrics.jsonl beside a config.yaml"
            raise ValueError(f"{folder} must be the output_dir of a run or contain runs: {problem}")
        runs |= {path.resolve(): path for path in paths}
    return [_read_run(path) for path in runs.values()]


def _read_run(folder: Path) -> LoggedRun:
    settings = experiment_settings(config_of_run(folder / "config.yaml"))
    del settings["seed"]
    for name, value in settings.items():
        if isinstance(value, list):
            settings[name] = tuple(value)
    return LoggedRun(folder, settings, read_metrics(folder / "metrics.jsonl"))


def compare(runs: list[LoggedRun], names: list[str]) -> list[RunGroup]:
    """Group runs that differ only in the settings ``names``; runs of equal settings are the seeds
    of a variant.

    Without ``names``, each comparison has one variant. Raises MissingRuns if there is no
    comparison.
    """
    grouped: dict[Settings, dict[Settings, list[LoggedRun]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run in runs:
        fixed = tuple(item for item in run.settings.items() if item[0] not in names)
        compared = tuple((name, run.settings[name]) for name in names if name in run.settings)
        grouped[fixed][compared].append(run)
    found = [
        (fixed, variants) for fixed, variants in grouped.items() if len(variants) > 1 or not names
    ]
    if not found:
        raise MissingRuns(f"no runs differ only in {names[0]}")
    labels = _labels([fixed for fixed, _ in found])
    return [
        RunGroup(label, dict(zip(_labels(list(v)), v.values())))
        for label, (_, v) in zip(labels, found)
    ]


def _labels(choices: list[Settings]) -> list[str]:
    """Return a label for each choice of settings: those whose values differ.

    A choice may lack a setting.
    """
    values = defaultdict(set)
    for name, value in itertools.chain(*choices):
        values[name].add(value)
    shown = [
        [(name, value) for name, value in settings if len(values[name]) > 1] for settings in choices
    ]
    return [
        ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in items
        )
        for items in shown
    ]


def curve(runs: list[LoggedRun], name: str, *, window: int = 1) -> Curve:
    """Return mean and spread of a metric over runs, smoothed over ``window`` iterations.

    Raises MissingRuns.
    """
    series = [
        {line["iteration"]: line[name] for line in run.lines if line.get(name) is not None}
        for run in runs
    ]
    common = sorted(set.intersection(*(set(points) for points in series)))
    if len(common) < window:
        raise MissingRuns(
            f"metrics.jsonl of {runs[0].folder} and its other seeds must contain at least {window} "
            f"iterations of {name}"
        )
    # (runs, iterations)
    values = np.array([[points[iteration] for iteration in common] for points in series])
    smooth = np.lib.stride_tricks.sliding_window_view(values, window, axis=1).mean(-1)
    return Curve(np.array(common[window - 1 :]), smooth.mean(0), smooth.std(0))
