"""Draw figures 4 and 9 of the paper (arXiv:2603.21872), which need no run.

    python -m examples.sampler_figures --output_dir outputs/figures
    python -m examples.sampler_figures --output_dir outputs/figures --gradients outputs/gradients/gradients.json

Figure 4 is the scale of the log-probability's gradient by noise level, beside 1 / std and norms
that examples.gradient_norms measured. Figure 9 is the noise of each step in three conventions at
sigma 1.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder, read_json
from hyvideo.schedulers import transitions
from hyvideo.schedulers.transitions import sampler_of
from studies.figures.figures import label_axes, panels_of, save_figure
from studies.tables.cells import METHODS

PAPER = {"num_steps": 20, "shift": 5.0, "eta": 0.5, "last_step": "stochastic"}
# The diffusion coefficient s / (1 - s) of sage and flow is infinite at sigma = 1, so their first
# step is a convention. In (a) the interval of sage is empty and its first std is 0; in (b) the
# first std of flow diverges.
REGIMES = {
    "sigma_1": "(a) both start at the second level",
    "clamp": f"(b) both clamped at sigma {transitions.SAGE_SIGMA_MAX}",
    "own": "(c) each with its default",
}
LINES = {  # of figure 4, all scaled to agree with the first one at the middle step
    "theory": ("o-", "|d log p / d v|"),
    "inverse_std": ("--", "1 / std"),
    "norm": ("s", "measured"),
    "norm_weighted": ("x", "measured, with the equalizer"),
}


def figure_4(folder: Path, measured: Sequence[dict] = ()) -> Path:
    """Draw gradient norms by noise level: a panel for each measurement, or for each sampler of the
    paper.
    """
    shown = measured or [
        PAPER | {"sde_type": sde, "steps": steps_of(sde, **PAPER)} for sde in METHODS
    ]
    figure, panels = panels_of(len(shown))
    for axes, content in zip(panels, shown):
        steps = content["steps"]
        middle = steps[len(steps) // 2]
        for name, (style, label) in LINES.items():
            if name in middle:
                values = [step[name] * middle["theory"] / middle[name] for step in steps]
                axes.plot(
                    [step["sigma"] for step in steps], values, style, markersize=4, label=label
                )
        axes.set_yscale("log")
        axes.invert_xaxis()
        sampler = (
            f"{content['num_steps']} steps, shift {content['shift']:g}, eta {content['eta']:.3g}"
        )
        title = f"{sampler_of(content['sde_type']).label}, {sampler}"
        label_axes(axes, title, "noise level sigma", "scale of the gradient")
    return save_figure(figure, folder, "figure4")


def steps_of(
    sde_type: str, num_steps: int, shift: float, eta: float, last_step: str
) -> list[dict[str, float]]:
    """Return noise level, 1 / std and theoretical gradient norm of each stochastic step."""
    levels = transitions.shifted_levels(num_steps, shift)
    norm = sampler_of(sde_type).log_prob_grad_norm
    steps = zip(levels, transitions.schedule(sde_type, levels, eta, last_step))
    return [
        {"sigma": s, "inverse_std": 1 / step.std, "theory": norm(step)}
        for s, step in steps
        if step.is_stochastic
    ]


def figure_9(folder: Path) -> Path:
    """Draw the standard deviation of each step of sage and flow in three conventions at
    sigma = 1.
    """
    levels = transitions.shifted_levels(PAPER["num_steps"], PAPER["shift"])
    figure, panels = panels_of(len(REGIMES))
    for axes, (regime, title) in zip(panels, REGIMES.items()):
        for sde in ("sage_grpo", "flow_grpo"):
            axes.plot(
                regime_stds(sde, levels, PAPER["eta"], regime),
                "o-",
                markersize=3,
                label=sampler_of(sde).label,
            )
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
        variances = [
            transitions.left_endpoint_variance(*pair, eta, min(pair[0], sigma_max))
            for pair in pairs
        ]
    return [math.sqrt(variance) for variance in variances]


@exit_on_error("sampler_figures.py")
def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder")
    words = "files of examples.gradient_norms (figure 4)"
    parser.add_argument("--gradients", nargs="+", type=Path, default=[], help=words)
    options = parser.parse_args(argv)
    measured = [read_json(path, "--gradients") for path in options.gradients]
    make_folder(options.output_dir)
    print(f"wrote {figure_4(options.output_dir, measured)} and {figure_9(options.output_dir)}")


if __name__ == "__main__":
    main()
