"""Pictures of recipes: measures over what was spent, and the reward against what it may cost unseen."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from hyvideo.evaluation.studies.intervals import Interval

Curves = dict[str, list[dict[str, Interval]]]  # by recipe, at each validation, by measure


def draw_curves(curves: Curves, axis: str, measures: list[str], path: Path) -> None:
    """A panel for each measure, a line and the band of its interval for each recipe."""
    measures = [name for name in measures if _has(curves, name)]
    figure, panels = plt.subplots(1, len(measures), figsize=(4.2 * len(measures), 3.6), squeeze=False)
    for axes, measure in zip(panels[0], measures):
        for recipe, points in curves.items():
            spent, (mean, low, high) = _numbers(points, axis)[0], _numbers(points, measure)
            (line,) = axes.plot(spent, mean, "o-", markersize=3, label=recipe)
            axes.fill_between(spent, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(title=measure, xlabel=axis)
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize="small")
    _save(figure, path)


def draw_pareto(curves: Curves, path: Path) -> None:
    """The reward, measured where it can be, against Frechet distance and diversity: ways there, and ends named."""
    reward = "True reward" if _has(curves, "True reward") else "Reward"
    measures = [name for name in ("Frechet distance", "Diversity") if _has(curves, name)]
    figure, panels = plt.subplots(1, max(1, len(measures)), figsize=(5.4 * max(1, len(measures)), 4.4), squeeze=False)
    for axes, measure in zip(panels[0], measures):
        for recipe, points in curves.items():
            (x, *x_range), (y, *y_range) = _numbers(points, measure), _numbers(points, reward)
            (line,) = axes.plot(x, y, "-", alpha=0.35, linewidth=1)
            ends = [np.abs(np.array(part)[:, -1:] - at[-1]) for part, at in ((x_range, x), (y_range, y))]
            axes.errorbar(x[-1], y[-1], xerr=ends[0], yerr=ends[1], fmt="o", color=line.get_color(), capsize=2)
            axes.annotate(recipe, (x[-1], y[-1]), xytext=(5, 5), textcoords="offset points", fontsize="small")
        axes.set(
            xlabel=f"{measure} ({'lower' if measure == 'Frechet distance' else 'higher'} is better)", ylabel=reward
        )
        axes.grid(alpha=0.3)
    _save(figure, path)


def _has(curves: Curves, measure: str) -> bool:
    return all(measure in point for points in curves.values() for point in points)


def _numbers(points: list[dict[str, Interval]], measure: str) -> np.ndarray:
    """Mean, low and high. Shape: (3, points)."""
    return np.array([(p[measure].mean, p[measure].low, p[measure].high) for p in points]).T


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
