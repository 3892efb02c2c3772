"""Curves of several runs from their metrics.jsonl, averaged over the seeds of equal settings."""

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
from hyvideo.records.metrics_file import read_metrics

# Settings that have no effect without a trust region.
TRUST_REGION_SETTINGS = tuple(name for name in asdict(TrustRegionSettings()) if name != "kl_strategy")


@dataclass(frozen=True)
class Run:
    """A training run, read from its folder."""

    folder: Path
    config: Config
    settings: dict  # settings that affect training, without the seed; kl_strategy is resolved; hashable
    lines: list[dict]  # of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """A metric over the iterations that all runs have."""

    iterations: np.ndarray  # (points,)
    mean: np.ndarray  # (points,)
    std: np.ndarray  # (points,), over the runs; 0 for one run


@dataclass(frozen=True)
class Comparison:
    """Runs that differ only in the compared setting and in their seeds."""

    fixed: dict[str, object]
    distinct: tuple[str, ...]  # fixed settings that differ between the comparisons
    variants: dict[object, list[Run]]  # by the value of the compared setting

    def label(self, without: Iterable[str] = ()) -> str:
        values = {name: self.fixed[name] for name in self.distinct if name in self.fixed and name not in without}
        return ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in values.items())


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Return the runs that the folders are or contain. Raises ValueError for a folder without runs."""
    runs = {}
    for folder in folders:
        paths = [folder] if (folder / "metrics.jsonl").is_file() else [p.parent for p in folder.rglob("metrics.jsonl")]
        paths = [path for path in sorted(paths) if (path / "config.yaml").is_file()]
        if not paths:
            problem = folder_problem(folder) or "found no metrics.jsonl beside a config.yaml"
            raise ValueError(f"{folder} must be the output_dir of a run or contain runs: {problem}")
        runs |= {path.resolve(): path for path in paths}
    return [_read_run(path) for path in runs.values()]


def _read_run(folder: Path) -> Run:
    config = load_config(folder / "config.yaml")
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in experiment_settings(config).items()}
    del settings["seed"]
    return Run(folder, config, settings, read_metrics(folder / "metrics.jsonl"))


def merge_schedule(run: Run) -> Run:
    """Return the run with the KL schedule, its warm-up and gain merged into one readable setting, ``kl_schedule``."""
    if "kl_schedule" not in run.settings:
        return run
    rest = dict(run.settings)
    warmup, gain = rest.pop("kl_warmup_updates"), rest.pop("kl_gain")
    rising = "" if rest["kl_schedule"] == "constant" else f", rises over {warmup} updates"
    words = rest["kl_schedule"] + rising + (f", gain {gain:g}" if rest["kl_schedule"] == "adaptive" else "")
    return replace(run, settings=rest | {"kl_schedule": words})


def compare(runs: list[Run], name: str, *, may_lack: Iterable[str] = ()) -> list[Comparison]:
    """Group runs that differ only in ``name``. Runs without the settings in ``may_lack`` join all matching groups."""
    grouped: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))  # fixed, optional settings, variant
    for run in runs:
        if name not in run.settings:  # such as the KL schedule of a run without a trust region
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
    # A setting that only some comparisons have is implied by another one, so its absence is no difference.
    distinct = tuple(name for name in names if len({fixed[name] for fixed, _ in found if name in fixed}) > 1)
    return [Comparison(fixed, distinct, dict(sorted(variants.items(), key=str))) for fixed, variants in found]


def curve(runs: list[Run], name: str, *, window: int = 1) -> Curve | None:
    """Return mean and spread of a metric over runs, smoothed over ``window`` iterations, or None with too few."""
    series = [{line["iteration"]: line[name] for line in run.lines if line.get(name) is not None} for run in runs]
    common = sorted(set.intersection(*(set(points) for points in series)))
    if len(common) < window:
        return None
    values = np.array([[points[iteration] for iteration in common] for points in series])  # (runs, iterations)
    smooth = np.lib.stride_tricks.sliding_window_view(values, window, axis=1).mean(-1)
    return Curve(np.array(common[window - 1 :]), smooth.mean(0), smooth.std(0))
