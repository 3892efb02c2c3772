"""Draw figures 4 and 9 of the paper (arXiv:2603.21872), which need no run.

    python -m examples.sampler_figures --output_dir outputs/figures
    python -m examples.sampler_figures --output_dir outputs/figures --gradients outputs/gradients.json

Figure 4 is the scale of the log-probability's gradient by noise level, beside 1 / std and norms that
examples.gradient_norms measured. Figure 9 is the noise of each step in three conventions at sigma 1.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from hyvideo.data.outside import Parser, exit_on_error, make_folder, read_json
from hyvideo.evaluation.figures.figures import label_axes, panels_of, save_figure
from hyvideo.evaluation.studies.cells import METHODS
from hyvideo.schedulers import transitions
from hyvideo.schedulers.transitions import sampler_of

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


def figure_4(folder: Path, measured: Sequence[dict] = ()) -> Path:
    """Draw the log-probability's gradient norm by noise level beside 1 / std, for the measured samplers or the paper's.

    ``measured`` norms over the parameters are scaled to agree with the theory of their sampler at the middle step.
    """
    used = [(m["sde_type"], Sampling(m["num_steps"], m["shift"], m["eta"], m["last_step"])) for m in measured]
    samplers: dict[str, list[Sampling]] = {}
    for sde, sampler in dict.fromkeys(used or [(sde, Sampling()) for sde in METHODS]):
        samplers.setdefault(sde, []).append(sampler)
    figure, panels = panels_of(len(samplers))
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
        label_axes(axes, sampler_of(sde).label, "noise level sigma", "scale of the gradient")
    return save_figure(figure, folder, "figure4")


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


def figure_9(folder: Path) -> Path:
    """Draw the standard deviation of each step of sage and flow in three conventions at sigma = 1."""
    paper = Sampling()
    levels = transitions.shifted_levels(paper.num_steps, paper.shift)
    figure, panels = panels_of(len(REGIMES))
    for axes, (regime, title) in zip(panels, REGIMES.items()):
        for sde in ("sage_grpo", "flow_grpo"):
            axes.plot(regime_stds(sde, levels, paper.eta, regime), "o-", markersize=3, label=sampler_of(sde).label)
        label_axes(axes, title, "step", "standard deviation of the step's noise")
    return save_figure(figure, folder, "figure9")


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


def read_measured(path: Path) -> dict:
    """Return the content of a file of examples.gradient_norms. Raises ValueError for any other file."""
    content = read_json(path, "--gradients")
    if not {"sde_type", "num_steps", "steps"} <= content.keys():
        raise ValueError(f"--gradients must be JSON files of examples.gradient_norms, got {path}")
    return content


@exit_on_error("sampler_figures.py")
def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--gradients", nargs="+", type=Path, default=[], help="JSON files of examples.gradient_norms (figure 4)"
    )
    options = parser.parse_args(argv)
    measured = [read_measured(path) for path in options.gradients]
    make_folder(options.output_dir)
    print(f"wrote {figure_4(options.output_dir, measured)} and {figure_9(options.output_dir)}")


if __name__ == "__main__":
    main()
