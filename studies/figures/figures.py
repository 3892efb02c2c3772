"""Figures 3, 7 and 8 of the paper (arXiv:2603.21872), from the metrics of runs.

    3  reward with and without the equalizer, for each SDE         8  mean and spread of the reward by trust region
    7  schedules of the KL coefficient: VQ, MQ and TA              0  learning curve of a run (not in the paper)

A figure has a row for each comparison: runs that differ only in the compared settings, with a line
for each variant.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyvideo.settings.objectives.base import TrustRegionSettings
from studies.figures.curves import LoggedRun, MissingRuns, RunGroup, compare, curve

COMPARED = {  # settings by figure, the decisive one first
    3: ["use_grad_balancing"],
    7: ["kl_schedule", "kl_warmup_updates"],
    # runs without a trust region have only kl_strategy
    8: ["kl_strategy", *sorted(TrustRegionSettings.model_fields.keys() - {"kl_strategy"})],
}
METRICS = {
    3: {"reward/mean": "reward"},
    7: {"reward/VQ": "VQ", "reward/MQ": "MQ", "reward/TA": "TA", "kl/coef": "KL coefficient"},
    8: {
        "reward/mean": "mean of the reward",
        "reward/std": "standard deviation of the reward within a group",
    },
}


def draw(number: int, runs: list[LoggedRun], folder: Path, *, window: int) -> str:
    """Draw a figure into the folder and return a message: its file, or why it was skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"figure {number}" if number else "learning curve"
    stem = f"figure{number}" if number else "learning_curve"
    try:
        if number:
            path = _draw(compare(runs, COMPARED[number]), METRICS[number], folder, stem, window)
        else:
            path = learning_curve(runs, folder, stem, window=window)
    except MissingRuns as reason:
        return f"{name}: skipped, {reason}"
    return f"{name}: {path}"


def learning_curve(runs: list[LoggedRun], folder: Path, stem: str, *, window: int) -> Path:
    """Draw the reward and its dimensions over iterations, for one run or for several seeds
    of it.
    """
    comparisons = compare(runs, [])
    if len(comparisons) != 1:
        raise MissingRuns(
            f"it needs runs that differ only in their seed, got {len(comparisons)} different "
            "settings"
        )
    scored = [name[7:] for name in (runs[0].lines or [{}])[-1] if name.startswith("reward/")]
    metrics = {"reward/mean": "reward"} | {
        f"reward/{n}": n for n in scored if n not in ("mean", "std", "missing")
    }
    window = max(1, min(window, *(len(run.lines) for run in runs)))
    return _draw([RunGroup("", {runs[0].folder.name: runs})], metrics, folder, stem, window)


def _draw(
    comparisons: list[RunGroup], metrics: dict[str, str], folder: Path, stem: str, window: int
) -> Path:
    """Draw a row of panels for each comparison, with a panel for each metric and a line for each
    variant.
    """
    titles = []
    curves = []
    for comparison in comparisons:
        for metric, label in metrics.items():
            titles.append((comparison.label, label))
            by_variant = {}
            for name, runs in comparison.variants.items():
                by_variant[f"{name} ({len(runs)} seed(s))"] = curve(runs, metric, window=window)
            curves.append(by_variant)
    figure, panels = panels_of(len(metrics), len(comparisons))
    for axes, (title, label), by_variant in zip(panels, titles, curves):
        for variant, points in by_variant.items():
            (line,) = axes.plot(points.iterations, points.mean, label=variant)
            low = points.mean - points.std
            high = points.mean + points.std
            axes.fill_between(
                points.iterations, low, high, color=line.get_color(), alpha=0.2, linewidth=0
            )
        y_label = f"{label}, mean of {window} iterations" if window > 1 else label
        label_axes(axes, title or label, "iteration", y_label)
    return save_figure(figure, folder, stem)


def panels_of(columns: int, rows: int = 1) -> tuple[Figure, list[Axes]]:
    size = (4.2 * columns, 3.4 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, list(axes.flat)


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize="small")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def save_figure(figure: Figure, folder: Path, stem: str) -> Path:
    """Write <stem>.png and return its path."""
    path = folder / f"{stem}.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
