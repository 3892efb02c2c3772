"""Figures 3, 4, 7, 8 and 9 of the paper (arXiv:2603.21872), from the metrics of runs or from theory alone.

    3  reward with and without the equalizer, for each SDE         8  mean and spread of the reward by trust region
    4  gradient norm by noise level, beside 1 / std                9  noise of each step in three conventions at sigma 1
    7  schedules of the KL coefficient: VQ, MQ and TA              0  learning curve of a run (not in the paper)

A figure is skipped if its runs are missing; `MissingRuns` describes which.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyvideo.evaluation.figures.curves import TRUST_REGION_SETTINGS, Comparison, Run, compare, curve, merge_schedule
from hyvideo.evaluation.studies.cells import METHODS
from hyvideo.schedulers import transitions
from hyvideo.schedulers.transitions import sampler_of

EQUALIZER = {True: "with equalizer", False: "without equalizer"}
PANEL_SETTINGS = ("sde_type", "eta", "match_noise")  # the noise scale depends on the sampler if it is matched
# The diffusion coefficient s / (1 - s) of sage and flow is infinite at sigma = 1, so their first step is a convention.
# In (a) the interval of sage is empty and its first std is 0; in (b) the first std of flow diverges.
REGIMES = {
    "sigma_1": "(a) both start at the second level",
    "clamp": f"(b) both clamped at sigma {transitions.SAGE_SIGMA_MAX}",
    "own": "(c) each with its default",
}


class Sampling(NamedTuple):
    """Settings of the rollout sampler; the paper's by default."""

    num_steps: int = 20
    shift: float = 5.0
    eta: float = 0.5
    last_step: str = "stochastic"

    @property
    def name(self) -> str:
        return f"{self.num_steps} steps, shift {self.shift:g}, eta {self.eta:.3g}"


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
        figure, panels = _panels(len(group))
        for axes, comparison in zip(panels, group):
            title = f"{sampler_of(comparison.fixed['sde_type']).label}, eta {comparison.fixed['eta']:.3g}"
            variants = {label: comparison.variants[is_used] for is_used, label in EQUALIZER.items()}
            _draw(axes, variants, "reward/mean", "reward", window, title=title)
        paths.append(_save(figure, folder, "figure3", group[0].label(without=PANEL_SETTINGS), number))
    return paths


def figure_4(runs: list[Run], folder: Path, *, window: int, measured: Sequence[dict] = ()) -> list[Path]:
    """Draw the log-probability's gradient norm by noise level beside 1 / std, for the runs' samplers or the paper's.

    ``measured`` norms over the parameters are scaled to agree with the theory of their sampler at the middle step.
    """
    used = [(m["sde_type"], Sampling(m["num_steps"], m["shift"], m["eta"], m["last_step"])) for m in measured]
    for rollout in [] if measured else [run.config.rollout for run in runs]:
        sampler = Sampling(rollout.grpo_sampling_steps, rollout.shift, rollout.eta, rollout.last_step)
        used.append((rollout.sde_type, sampler))
    samplers: dict[str, list[Sampling]] = {}
    for sde, sampler in dict.fromkeys(used or [(sde, Sampling()) for sde in METHODS]):
        samplers.setdefault(sde, []).append(sampler)
    figure, panels = _panels(len(samplers))
    for axes, (sde, sde_samplers) in zip(panels, samplers.items()):
        for sampler in sde_samplers:
            sigmas, norms, inverse_std = gradient_scale(sde, sampler)
            middle = len(sigmas) // 2
            (line,) = axes.plot(sigmas, norms, "o-", markersize=3, label=f"|d log p / d v|, {sampler.name}")
            rule = inverse_std * (norms[middle] / inverse_std[middle])
            axes.plot(sigmas, rule, "--", color=line.get_color(), label="1 / std, scaled to agree midway")
        for norms in (m for m in measured if m["sde_type"] == sde):
            _draw_measured(axes, norms["steps"])
        axes.set_yscale("log")
        axes.invert_xaxis()
        _label(axes, sampler_of(sde).label, "noise level sigma", "scale of the gradient")
    return [_save(figure, folder, "figure4")]


def gradient_scale(sde_type: str, sampler: Sampling) -> np.ndarray:
    """Return noise level, log-probability gradient norm and 1 / std of the stochastic steps. Shape: (3, steps)."""
    levels = transitions.shifted_levels(sampler.num_steps, sampler.shift)
    steps = zip(levels, transitions.schedule(sde_type, levels, sampler.eta, sampler.last_step))
    steps = [(sigma, step) for sigma, step in steps if step.std]
    return np.array([(s, sampler_of(sde_type).log_prob_grad_norm(step), 1 / step.std) for s, step in steps]).T


def _draw_measured(axes: Axes, steps: list[dict]) -> None:
    middle = steps[len(steps) // 2]
    sigmas = [step["sigma"] for step in steps]
    for name, marker, label in (("norm", "s", "measured"), ("norm_weighted", "x", "measured, with the equalizer")):
        factor = middle["theory"] / middle[name]
        axes.plot(sigmas, [factor * step[name] for step in steps], marker, label=label)


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


def figure_9(runs: list[Run], folder: Path, *, window: int) -> list[Path]:
    """Draw the standard deviation of each step of sage and flow in three conventions at sigma = 1."""
    paper = Sampling()
    levels = transitions.shifted_levels(paper.num_steps, paper.shift)
    figure, panels = _panels(len(REGIMES))
    for axes, (regime, title) in zip(panels, REGIMES.items()):
        for sde in ("sage_grpo", "flow_grpo"):
            axes.plot(regime_stds(sde, levels, paper.eta, regime), "o-", markersize=3, label=sampler_of(sde).label)
        _label(axes, title, "step", "standard deviation of the step's noise")
    return [_save(figure, folder, "figure9")]


def regime_stds(sde_type: str, levels: tuple[float, ...], eta: float, regime: str) -> list[float]:
    """Return the standard deviation of each step of sage or flow in one of the ``REGIMES``."""
    if regime == "own":
        return [step.std for step in transitions.schedule(sde_type, levels, eta, "stochastic")]
    sigma_max = levels[1] if regime == "sigma_1" else transitions.SAGE_SIGMA_MAX
    pairs = list(zip(levels, levels[1:]))
    if sde_type == "sage_grpo":
        variances = [transitions.sage_variance(*pair, eta, levels[1], sigma_max) for pair in pairs]
    else:
        variances = [transitions.left_endpoint_variance(*pair, eta, min(pair[0], sigma_max)) for pair in pairs]
    return [math.sqrt(variance) for variance in variances]


FIGURES: dict[int, Callable[..., list[Path]]] = {0: learning_curve, 3: figure_3, 4: figure_4, 7: figure_7}
FIGURES |= {8: figure_8, 9: figure_9}


def draw(number: int, runs: list[Run], folder: Path, *, window: int, measured: Sequence[dict] = ()) -> str:
    """Draw a figure into the folder and return a message: its files, or why it was skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"figure {number}" if number else "learning curve"
    try:
        paths = FIGURES[number](runs, folder, window=window, **({"measured": measured} if number == 4 else {}))
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
    figure, panels = _panels(len(names))
    for axes, (metric, label) in zip(panels, names.items()):
        _draw(axes, comparison.variants, metric, label, window, title=label)
    return _save(figure, folder, stem, comparison.label(), number)


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
    _label(axes, title, "iteration", f"{label}, mean of {window} iterations" if window > 1 else label)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.4), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _save(figure: Figure, folder: Path, stem: str, title: str = "", number: int = 0) -> Path:
    """Write <stem>.png, numbered after the first comparison; the title names the fixed settings."""
    if title:
        figure.suptitle(title, fontsize="small")
    path = folder / (f"{stem}_{number + 1}.png" if number else f"{stem}.png")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
