"""Runs laid over each other: metrics.jsonl by iteration, runs of equal settings averaged over their seeds.

runs -> comparisons (all settings equal but the compared one) -> variants (all equal but the seed) -> mean and band
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from hyvideo.config.command_line import load_config
from hyvideo.config.identity import experiment_settings
from hyvideo.config.sections import TrustRegionSettings
from hyvideo.config.settings import Config
from hyvideo.data.outside import folder_problem
from hyvideo.records.metrics_file import whole_lines

# Settings that say nothing in a run without one.
OF_A_TRUST_REGION = tuple(name for name in asdict(TrustRegionSettings()) if name != "kl_strategy")


@dataclass(frozen=True)
class Run:
    """A training run as it lies in its folder."""

    folder: Path
    config: Config
    settings: dict  # those that change what is learned, but the seed; the trust region by its own name; hashable
    lines: list[dict]  # of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """A metric over the iterations that all of its runs have."""

    iterations: np.ndarray  # (points,)
    mean: np.ndarray  # (points,)
    std: np.ndarray  # (points,), over the runs; 0 for one run


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in the compared setting and their seeds alone."""

    fixed: dict[str, object]
    distinct: tuple[str, ...]  # fixed settings in which it differs from the other comparisons
    variants: dict[object, list[Run]]  # by the value of the compared setting

    def label(self, without: Iterable[str] = ()) -> str:
        values = {name: self.fixed[name] for name in self.distinct if name in self.fixed and name not in without}
        return ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in values.items())


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Runs that the folders are, or have in them. Raises ValueError for a folder without any."""
    runs = {}
    for folder in folders:
        paths = [folder] if (folder / "metrics.jsonl").is_file() else [p.parent for p in folder.rglob("metrics.jsonl")]
        paths = [path for path in sorted(paths) if (path / "config.yaml").is_file()]
        if not paths:
            lacking = folder_problem(folder) or "no metrics.jsonl beside a config.yaml"
            raise ValueError(f"{folder} must be a run, or have runs in it: {lacking}")
        runs |= {path.resolve(): path for path in paths}
    return [_read_run(path) for path in runs.values()]


def _read_run(folder: Path) -> Run:
    config = load_config(folder / "config.yaml")
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in experiment_settings(config).items()}
    del settings["seed"]
    return Run(folder, config, settings, [json.loads(line) for _, line in whole_lines(folder / "metrics.jsonl")])


def by_schedule(run: Run) -> Run:
    """A run whose schedule of the KL coefficient, warm-up and gain are one setting, ``kl_schedule``, in words."""
    if "kl_schedule" not in run.settings:
        return run
    rest = dict(run.settings)
    warmup, gain = rest.pop("kl_warmup_updates"), rest.pop("kl_gain")
    rising = "" if rest["kl_schedule"] == "constant" else f", rises over {warmup} updates"
    words = rest["kl_schedule"] + rising + (f", gain {gain:g}" if rest["kl_schedule"] == "adaptive" else "")
    return replace(run, settings=rest | {"kl_schedule": words})


def compare(runs: list[Run], name: str, *, may_lack: Iterable[str] = ()) -> list[Comparison]:
    """Runs that differ in ``name`` alone, put together; one without what it ``may_lack`` joins all that have it."""
    grouped: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))  # fixed, optional settings, variant
    for run in runs:
        if name not in run.settings:  # as the schedule of a run without a trust region
            continue
        rest = [item for item in run.settings.items() if item[0] != name]
        fixed = tuple(item for item in rest if item[0] not in may_lack)
        optional = tuple(item for item in rest if item[0] in may_lack)
        grouped[fixed][optional][run.settings[name]].append(run)
    comparisons = {}
    for fixed, by_optional in grouped.items():
        lacking = by_optional.pop((), {}) if len(by_optional) > 1 else {}
        comparisons |= {fixed + optional: variants | lacking for optional, variants in by_optional.items()}
    found = [(dict(fixed), variants) for fixed, variants in comparisons.items() if len(variants) > 1]
    names = dict.fromkeys(name for fixed, _ in found for name in fixed)
    # A setting that some lack, as those of a trust region, follows from another that has two values itself.
    distinct = tuple(name for name in names if len({fixed[name] for fixed, _ in found if name in fixed}) > 1)
    return [Comparison(fixed, distinct, dict(sorted(variants.items(), key=str))) for fixed, variants in found]


def curve(runs: list[Run], name: str, *, window: int = 1) -> Curve | None:
    """Mean and spread of a metric over runs, means of ``window`` iterations; None where one of them has too few."""
    series = [{line["iteration"]: line[name] for line in run.lines if line.get(name) is not None} for run in runs]
    common = sorted(set.intersection(*(set(points) for points in series)))
    if len(common) < window:
        return None
    values = np.array([[points[iteration] for iteration in common] for points in series])  # (runs, iterations)
    smooth = np.lib.stride_tricks.sliding_window_view(values, window, axis=1).mean(-1)
    return Curve(np.array(common[window - 1 :]), smooth.mean(0), smooth.std(0))
