"""Figures 3, 4, 7, 8 and 9 of the paper from runs' records, or from the theory alone.

    3  reward with and without the equalizer, for each SDE         8  mean and spread of the reward by trust region
    4  gradient norm by noise level, beside 1 / std                9  noise of each step in three conventions at sigma 1
    7  schedules of the KL coefficient on VQ, MQ and TA

A figure that the runs do not allow is not made, and `Absent` says what it lacks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hyvideo.evaluation.figures.curves import OF_A_TRUST_REGION, Comparison, Run, compare, curve
from hyvideo.evaluation.samplers.tables import grad_norm_table, std_table
from hyvideo.evaluation.table2.runs import METHODS
from hyvideo.schedulers.transitions import SAGE_SIGMA_MAX

EQUALIZER = {True: "with equalizer", False: "without equalizer"}
REGIMES = {
    "sigma_1": "(a) both begin at the second level",
    "clamp": f"(b) both clamped at sigma {SAGE_SIGMA_MAX}",
    "own": "(c) each with its own default",
}


class Sampler(NamedTuple):
    """Settings of the sampler of rollouts; the paper's by default."""

    num_steps: int = 20
    shift: float = 5.0
    eta: float = 0.5
    last_step: str = "stochastic"

    @property
    def name(self) -> str:
        return f"{self.num_steps} steps, shift {self.shift:g}, eta {self.eta:.3g}"


class Absent(Exception):
    """Reason why a figure cannot be made."""


def figure_3(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Reward over iterations with and without the equalizer, a panel for each SDE."""
    comparisons = compare(runs, ["use_grad_balancing"])
    if not comparisons:
        raise Absent("no runs differ in use_grad_balancing alone")
    # The noise goes with the sampler, as where the samplers' noise is matched.
    of_panels = ("sde_type", "eta", "match_noise")
    figures: dict[tuple, list[Comparison]] = {}
    for comparison in comparisons:
        rest = tuple(item for item in comparison.fixed.items() if item[0] not in of_panels)
        figures.setdefault(rest, []).append(comparison)
    paths = []
    for number, group in enumerate(figures.values()):
        figure, panels = _panels(len(group))
        for axes, comparison in zip(panels, group):
            for has_equalizer, label in EQUALIZER.items():
                _draw(axes, comparison.variants[has_equalizer,], "reward/mean", label, window)
            title = f"{METHODS[comparison.fixed['sde_type']]}, eta {comparison.fixed['eta']:.3g}"
            _label(axes, title, "iteration", _with_window("reward", window))
        distinct = tuple(name for name in group[0].distinct if name not in of_panels)
        title = dataclasses.replace(group[0], distinct=distinct).label
        paths.append(_save(figure, folder, "figure3", title, number))
    return paths


def figure_4(runs: list[Run], folder: Path, *, window: int, measured: Sequence[dict] = ()) -> list[Path]:
    """Scale of the log-probability's gradient by noise level beside 1 / std, of the runs' samplers or the paper's.

    Args:
        measured: What ``scripts/measure_gradient_norms.py`` wrote: norms over the parameters, drawn with the scale of
            their own sampler. A factor that all steps share is not in the theory, so they are brought to meet midway.
    """
    if measured:
        samplers = {sde: [_sampler_of(m) for m in measured if m["sde_type"] == sde] for sde in METHODS}
    else:
        samplers = {sde: _samplers(runs, sde) for sde in METHODS}
    if not any(samplers.values()):
        samplers = {sde: [Sampler()] for sde in METHODS}
    samplers = {sde: of_sde for sde, of_sde in samplers.items() if of_sde}
    figure, panels = _panels(len(samplers))
    for axes, (sde, of_sde) in zip(panels, samplers.items()):
        for sampler in of_sde:
            sigmas, norms, inverse_std = gradient_scale(sde, sampler)
            middle = len(sigmas) // 2
            (line,) = axes.plot(sigmas, norms, "o-", markersize=3, label=f"|d log p / d v|, {sampler.name}")
            rule = inverse_std * (norms[middle] / inverse_std[middle])
            axes.plot(sigmas, rule, "--", color=line.get_color(), label="1 / std, scaled to meet it midway")
        for norms in (m for m in measured if m["sde_type"] == sde):
            _draw_measured(axes, norms)
        axes.set_yscale("log")
        axes.invert_xaxis()
        _label(axes, METHODS[sde], "noise level sigma", "scale of the gradient")
    return [_save(figure, folder, "figure4")]


def gradient_scale(sde_type: str, sampler: Sampler) -> tuple[Tensor, Tensor, Tensor]:
    """Noise level, gradient norm of the log-probability and 1 / std of stochastic steps. Shape of each: (steps,)."""
    *schedule, last_step = sampler
    stds = std_table(*schedule, sde_types=[sde_type], last_step=last_step)
    norms = grad_norm_table(*schedule, sde_types=[sde_type], last_step=last_step)[sde_type]
    is_stochastic = stds[sde_type] > 0
    return stds["sigma"][is_stochastic], norms[is_stochastic], 1 / stds[sde_type][is_stochastic]


def _draw_measured(axes: Axes, measured: dict) -> None:
    steps = measured["steps"]
    middle = steps[len(steps) // 2]
    sigmas = [step["sigma"] for step in steps]
    for name, label in (("norm", "measured"), ("norm_weighted", "measured, with the equalizer")):
        factor = middle["theory"] / middle[name]
        axes.plot(sigmas, [factor * step[name] for step in steps], "s" if name == "norm" else "x", label=label)


def _sampler_of(measured: dict) -> Sampler:
    return Sampler(measured["num_steps"], measured["shift"], measured["eta"], measured["last_step"])


def _samplers(runs: list[Run], sde_type: str) -> list[Sampler]:
    """Samplers of the runs of an SDE."""
    rollouts = [run.config.rollout for run in runs if run.config.rollout.sde_type == sde_type]
    return list(dict.fromkeys(Sampler(r.grpo_sampling_steps, r.shift, r.eta, r.last_step) for r in rollouts))


def figure_7(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """VQ, MQ and TA under the schedules of the KL coefficient, and the coefficient itself."""
    comparisons = compare(runs, ["kl_schedule"])
    names = {"reward/VQ": "VQ", "reward/MQ": "MQ", "reward/TA": "TA", "kl/coef": "KL coefficient"}
    if not comparisons:
        raise Absent("no runs with a trust region differ in kl_schedule alone")
    return [_by_variant(c, names, folder, "figure7", n, window) for n, c in enumerate(comparisons)]


def figure_8(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Mean and spread of the reward under the strategies of the trust region."""
    comparisons = compare(runs, ["kl_strategy"], may_lack=OF_A_TRUST_REGION)
    names = {"reward/mean": "mean of the reward", "reward/std": "spread of the reward within a group"}
    if not comparisons:
        raise Absent("no runs differ in kl_strategy alone")
    return [_by_variant(c, names, folder, "figure8", n, window) for n, c in enumerate(comparisons)]


def figure_9(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Standard deviation of each step of sage and flow in three conventions at sigma = 1; the paper's sampler."""
    figure, panels = _panels(len(REGIMES))
    for axes, (regime, title) in zip(panels, REGIMES.items()):
        stds = std_table(*Sampler()[:3], sde_types=("sage_grpo", "flow_grpo"), regime=regime)
        for sde in ("sage_grpo", "flow_grpo"):
            axes.plot(range(len(stds[sde])), stds[sde], "o-", markersize=3, label=METHODS[sde])
        _label(axes, title, "step", "standard deviation of the step's noise")
    return [_save(figure, folder, "figure9")]


FIGURES: dict[int, Callable[..., list[Path]]] = {3: figure_3, 4: figure_4, 7: figure_7, 8: figure_8, 9: figure_9}


def remarks(number: int, *, has_measured: bool) -> str | None:
    """Remark on what a figure does not show, though the paper's does."""
    if number == 4 and not has_measured:
        return "theory alone: give norms that scripts/measure_gradient_norms.py measured by --gradients"
    return None


def _by_variant(
    comparison: Comparison, names: dict[str, str], folder: Path, stem: str, number: int, window: int
) -> Path:
    """Draws a panel for each metric, a line for each variant."""
    figure, panels = _panels(len(names))
    for axes, (metric, label) in zip(panels, names.items()):
        for (variant,), runs in comparison.variants.items():
            _draw(axes, runs, metric, str(variant), window)
        _label(axes, label, "iteration", f"mean of {window} iterations" if window > 1 else label)
    return _save(figure, folder, stem, comparison.label, number)


def _draw(axes: Axes, runs: list[Run], metric: str, label: str, window: int) -> None:
    points = curve(runs, metric, window=window)
    if points is None:
        plt.close("all")
        raise Absent(f"the metrics.jsonl of {runs[0].folder} and its other seeds lack {window} iterations of {metric}")
    (line,) = axes.plot(points.iterations, points.mean, label=f"{label} ({points.num_runs} seed(s))")
    if points.num_runs > 1:
        low, high = points.mean - points.std, points.mean + points.std
        axes.fill_between(points.iterations, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.4), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _with_window(label: str, window: int) -> str:
    return f"{label}, mean of {window} iterations" if window > 1 else label


def _save(figure: Figure, folder: Path, stem: str, title: str = "", number: int = 0) -> Path:
    """Writes <stem>.png, comparisons after the first with a number; the title says what a comparison holds fixed."""
    if title:
        figure.suptitle(title, fontsize="small")
    path = folder / (f"{stem}_{number + 1}.png" if number else f"{stem}.png")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
