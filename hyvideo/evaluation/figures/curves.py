"""Runs laid over each other: metrics.jsonl by iteration, runs of equal settings averaged over their seeds.

runs -> comparisons (all settings equal but those compared) -> variants (all equal but the seed) -> mean and band
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hyvideo.config.command_line import load_config
from hyvideo.config.identity import experiment_settings
from hyvideo.config.sections import TrustRegionSettings
from hyvideo.config.settings import Config
from hyvideo.records.metrics_file import whole_lines

# Settings that say nothing in a run without one.
OF_A_TRUST_REGION = tuple(name for name in asdict(TrustRegionSettings()) if name != "kl_strategy")


@dataclass(frozen=True)
class Run:
    """A training run as it lies in its folder."""

    folder: Path
    config: Config
    settings: dict  # those that change what is learned; the trust region by its own name
    lines: list[dict]  # of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """A metric over the iterations that all of its runs have."""

    iterations: np.ndarray  # (points,)
    mean: np.ndarray  # (points,)
    std: np.ndarray  # (points,), over the runs; 0 for one run
    num_runs: int


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in the compared settings and their seeds alone."""

    fixed: dict[str, object]
    distinct: tuple[str, ...]  # fixed settings in which it differs from the other comparisons
    variants: dict[tuple, list[Run]]  # by the values of the compared settings

    @property
    def label(self) -> str:
        values = {name: self.fixed[name] for name in self.distinct if name in self.fixed}
        return ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in values.items())


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Runs that the folders are, or have in them. Raises ValueError for a folder without any."""
    runs = {}
    for folder in folders:
        paths = [folder] if (folder / "metrics.jsonl").is_file() else [p.parent for p in folder.rglob("metrics.jsonl")]
        paths = [path for path in sorted(paths) if (path / "config.yaml").is_file()]
        if not paths:
            raise ValueError(f"{folder} must be a run, or have runs in it: a config.yaml beside a metrics.jsonl")
        runs |= {path.resolve(): path for path in paths}
    return [read_run(path) for path in runs.values()]


def read_run(folder: Path) -> Run:
    config = load_config(folder / "config.yaml")
    lines = [json.loads(line) for _, line in whole_lines(folder / "metrics.jsonl")]
    return Run(folder, config, settings_of(config), lines)


def settings_of(config: Config) -> dict:
    """What makes one run differ from another, but the seed, hashable."""
    settings = experiment_settings(config)
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items() if name != "seed"}


def compare(runs: list[Run], names: list[str], *, may_lack: Iterable[str] = ()) -> list[Comparison]:
    """Runs that differ in ``names`` alone, put together, where at least two differ.

    Args:
        may_lack: Settings of which a run may have none; it takes part in the comparisons of all that have them.
    """
    optional = set(may_lack)
    grouped: dict[tuple, dict[tuple, dict[tuple, list[Run]]]] = {}  # by fixed settings, optional settings, variant
    for run in runs:
        if any(name not in run.settings for name in names):  # as the schedule of a run without a trust region
            continue
        rest = {name: value for name, value in run.settings.items() if name not in names}
        fixed = tuple((name, value) for name, value in rest.items() if name not in optional)
        more = tuple((name, value) for name, value in rest.items() if name in optional)
        variant = tuple(run.settings[name] for name in names)
        grouped.setdefault(fixed, {}).setdefault(more, {}).setdefault(variant, []).append(run)
    comparisons: dict[tuple, dict[tuple, list[Run]]] = {}
    for fixed, by_optional in grouped.items():
        lacking = by_optional.pop((), {}) if len(by_optional) > 1 else {}
        comparisons |= {fixed + more: variants | lacking for more, variants in by_optional.items()}
    comparisons = {fixed: variants for fixed, variants in comparisons.items() if len(variants) > 1}
    distinct = _differing([dict(fixed) for fixed in comparisons])
    return [Comparison(dict(fixed), distinct, dict(sorted(v.items(), key=str))) for fixed, v in comparisons.items()]


def curve(runs: list[Run], name: str, *, window: int = 1) -> Curve | None:
    """Mean and spread of a metric over runs, or None where one of them does not have it.

    Args:
        window: Iterations of which each point is the mean.
    """
    series = [{line["iteration"]: line[name] for line in run.lines if line.get(name) is not None} for run in runs]
    common = sorted(set.intersection(*(set(points) for points in series)))
    if len(common) < window:
        return None
    values = np.array([[points[iteration] for iteration in common] for points in series])  # (runs, iterations)
    kernel = np.full(window, 1 / window)
    smooth = np.array([np.convolve(row, kernel, mode="valid") for row in values])
    return Curve(np.array(common[window - 1 :]), smooth.mean(0), smooth.std(0), len(runs))


def _differing(settings: list[dict]) -> tuple[str, ...]:
    """Names whose value is not the same in all, or that some lack."""
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    return tuple(name for name in names if len({of_run.get(name, "absent") for of_run in settings}) > 1)
