"""Figures 3, 7 and 8 of the paper (arXiv:2603.21872), from the metrics of runs.

    3  reward with and without the equalizer, for each SDE         8  mean and spread of the reward by trust region
    7  schedules of the KL coefficient: VQ, MQ and TA              0  learning curve of a run (not in the paper)

A figure is skipped if its runs are missing; `MissingRuns` describes which.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyvideo.evaluation.figures.curves import TRUST_REGION_SETTINGS, Comparison, Run, compare, curve, merge_schedule
from hyvideo.schedulers.transitions import sampler_of

EQUALIZER = {True: "with equalizer", False: "without equalizer"}
PANEL_SETTINGS = ("sde_type", "eta", "match_noise")  # the noise scale depends on the sampler if it is matched


class MissingRuns(Exception):
    """Raised with the reason why a figure cannot be drawn."""


def learning_curve(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Draw the reward and its dimensions over iterations, for one run or for several seeds of it."""
    if (number := len({frozenset(run.settings.items()) for run in runs})) != 1:
        raise MissingRuns(f"it needs runs that differ only in their seed, got {number} different settings")
    scored = [name[7:] for name in (runs[0].lines or [{}])[-1] if name.startswith("reward/")]
    names = {"reward/mean": "reward"} | {f"reward/{n}": n for n in scored if n not in ("mean", "std", "missing")}
    window = max(1, min(window, *(len(run.lines) for run in runs)))
    return [_by_variant(Comparison({}, (), {runs[0].folder.name: runs}), names, folder, "learning_curve", 0, window)]


def figure_3(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Draw the reward over iterations with and without the equalizer, a panel for each SDE."""
    figures: dict[tuple, list[Comparison]] = {}
    for comparison in _compare(runs, "use_grad_balancing"):
        rest = tuple(item for item in comparison.fixed.items() if item[0] not in PANEL_SETTINGS)
        figures.setdefault(rest, []).append(comparison)
    paths = []
    for number, group in enumerate(figures.values()):
        figure, panels = panels_of(len(group))
        for axes, comparison in zip(panels, group):
            title = f"{sampler_of(comparison.fixed['sde_type']).label}, eta {comparison.fixed['eta']:.3g}"
            variants = {label: comparison.variants[is_used] for is_used, label in EQUALIZER.items()}
            _draw(axes, variants, "reward/mean", "reward", window, title=title)
        paths.append(save_figure(figure, folder, "figure3", group[0].label(without=PANEL_SETTINGS), number))
    return paths


def figure_7(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Draw VQ, MQ, TA and the KL coefficient by KL schedule."""
    names = {"reward/VQ": "VQ", "reward/MQ": "MQ", "reward/TA": "TA", "kl/coef": "KL coefficient"}
    comparisons = _compare([*map(merge_schedule, runs)], "kl_schedule", whose="runs with a trust region")
    return [_by_variant(c, names, folder, "figure7", n, window) for n, c in enumerate(comparisons)]


def figure_8(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Draw mean and standard deviation of the reward by trust region."""
    names = {"reward/mean": "mean of the reward", "reward/std": "standard deviation of the reward within a group"}
    comparisons = _compare(runs, "kl_strategy", may_lack=TRUST_REGION_SETTINGS)
    return [_by_variant(c, names, folder, "figure8", n, window) for n, c in enumerate(comparisons)]


FIGURES: dict[int, Callable[..., list[Path]]] = {0: learning_curve, 3: figure_3, 7: figure_7, 8: figure_8}


def draw(number: int, runs: list[Run], folder: Path, *, window: int) -> str:
    """Draw a figure into the folder and return a message: its files, or why it was skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"figure {number}" if number else "learning curve"
    try:
        paths = FIGURES[number](runs, folder, window=window)
    except MissingRuns as reason:
        return f"{name}: skipped, {reason}"
    return f"{name}: {', '.join(map(str, paths))}"


def _compare(runs: list[Run], name: str, *, whose: str = "runs", may_lack: Iterable[str] = ()) -> list[Comparison]:
    """Return the comparisons of runs that differ only in one setting. Raises MissingRuns if there are none."""
    if comparisons := compare(runs, name, may_lack=may_lack):
        return comparisons
    raise MissingRuns(f"no {whose} differ only in {name}")


def _by_variant(
    comparison: Comparison, names: dict[str, str], folder: Path, stem: str, number: int, window: int
) -> Path:
    """Draw a panel for each metric and a line for each variant."""
    figure, panels = panels_of(len(names))
    for axes, (metric, label) in zip(panels, names.items()):
        _draw(axes, comparison.variants, metric, label, window, title=label)
    return save_figure(figure, folder, stem, comparison.label(), number)


def _draw(axes: Axes, variants: dict, metric: str, label: str, window: int, *, title: str) -> None:
    """Draw a line for each variant, with a band over its seeds."""
    for variant, runs in variants.items():
        points = curve(runs, metric, window=window)
        if points is None:
            plt.close("all")
            source = f"metrics.jsonl of {runs[0].folder} and its other seeds"
            raise MissingRuns(f"{source} must contain at least {window} iterations of {metric}")
        (line,) = axes.plot(points.iterations, points.mean, label=f"{variant} ({len(runs)} seed(s))")
        if len(runs) > 1:
            low, high = points.mean - points.std, points.mean + points.std
            axes.fill_between(points.iterations, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    label_axes(axes, title, "iteration", f"{label}, mean of {window} iterations" if window > 1 else label)


def panels_of(count: int) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.4), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def save_figure(figure: Figure, folder: Path, stem: str, title: str = "", number: int = 0) -> Path:
    """Write <stem>.png, numbered after the first comparison; the title names the fixed settings."""
    if title:
        figure.suptitle(title, fontsize="small")
    path = folder / (f"{stem}_{number + 1}.png" if number else f"{stem}.png")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
