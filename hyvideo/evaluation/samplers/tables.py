"""What the four SDEs do at each step, as tables: noise, gradient norms, equalizer factors, and a search for bad steps.

    python -m hyvideo.evaluation.samplers.tables [--steps 20 --shift 5 --eta 0.5]    the tables
    python -m hyvideo.evaluation.samplers.tables --marginals                         how well densities are kept
    python -m hyvideo.evaluation.samplers.tables --search                    every schedule in a grid of settings

At the pole sigma = 1 the diffusion coefficient ``s / (1 - s)`` of sage and flow is infinite, so what their first step
does is a convention. Figure 9 of the paper sets three side by side, here called regimes:

    sigma_1    (a) the second level stands in for 1: the interval of sage collapses and its first std is 0
    clamp      (b) no level counts as closer to 1 than SAGE_SIGMA_MAX: the first std of flow explodes
    own        (c) each as it is trained: sage clamps, flow puts the second level in the place of 1

The tables hold float64, so that a figure or a test can be drawn from them without the rounding of the sampler.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hyvideo.evaluation.samplers.bad_steps import search, summary_rows
from hyvideo.evaluation.samplers.marginals import LEAST_STD, Mixture, falling_eta, interior_error, marginal_error
from hyvideo.grpo.equalizer import balancing_factors
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.schedulers.transitions import (
    SAGE_SIGMA_MAX,
    SDE_TYPES,
    Transition,
    left_endpoint_variance,
    log_prob_grad_norm,
    sage_variance,
    schedule,
    shifted_levels,
)

REGIMES = ("sigma_1", "clamp", "own")
TWO_PEAKS = Mixture(means=(-1.0, 1.0), std=0.3)


def std_table(
    num_steps: int = 20,
    shift: float = 5.0,
    eta: float = 0.5,
    *,
    sde_types: Sequence[str] = SDE_TYPES,
    regime: str = "own",
    last_step: str = "stochastic",
) -> dict[str, Tensor]:
    """Columns ``sigma`` and one of standard deviations for each SDE, 0 where a step is deterministic.

    Args:
        regime: What stands in for the pole, of ``REGIMES``. Those other than ``own`` are of sage and flow only.

    Returns: a column by its name. Shape of each: (steps,).
    """
    if regime not in REGIMES:
        raise ValueError(f"regime must be one of {', '.join(REGIMES)}, got {regime!r}")
    levels = shifted_levels(num_steps, shift)
    columns = {"sigma": _column(levels[:-1])}
    for sde_type in sde_types:
        if regime == "own":
            columns[sde_type] = _column(step.std for step in schedule(sde_type, levels, eta, last_step))
        else:
            sigma_max = levels[1] if regime == "sigma_1" else SAGE_SIGMA_MAX
            columns[sde_type] = _column(_clamped_stds(sde_type, levels, eta, sigma_max))
            columns[sde_type][-1] *= last_step == "stochastic"
    return columns


def _clamped_stds(sde_type: str, levels: tuple[float, ...], eta: float, sigma_max: float) -> Iterator[float]:
    """Of sage and flow, with the pole clamped at one level for both."""
    for sigma, sigma_next in zip(levels, levels[1:]):
        if sde_type == "sage_grpo":
            variance = sage_variance(sigma, sigma_next, eta, levels[1], sigma_max)
        elif sde_type == "flow_grpo":
            variance = left_endpoint_variance(sigma, sigma_next, eta, min(sigma, sigma_max))
        else:
            raise ValueError(f"a regime other than own is of sage_grpo and flow_grpo, got {sde_type}")
        yield math.sqrt(max(variance, 0.0))


def grad_norm_table(
    num_steps: int = 20,
    shift: float = 5.0,
    eta: float = 0.5,
    *,
    sde_types: Sequence[str] = SDE_TYPES,
    last_step: str = "stochastic",
) -> dict[str, Tensor]:
    """As `std_table`, of ``N_t``: the scale of the log-probability's gradient. Shape of each: (steps,)."""
    levels = shifted_levels(num_steps, shift)
    columns = {"sigma": _column(levels[:-1])}
    for sde_type in sde_types:
        steps = schedule(sde_type, levels, eta, last_step)
        columns[sde_type] = _column(log_prob_grad_norm(sde_type, step) for step in steps)
    return columns


def equalizer_table(num_steps: int = 20, shift: float = 5.0, eta: float = 0.5, **options) -> dict[str, Tensor]:
    """As `grad_norm_table`, of the equalizer's factors ``S_t = median(N) / N_t``. Shape of each: (steps,)."""
    columns = grad_norm_table(num_steps, shift, eta, **options)
    return {name: values if name == "sigma" else balancing_factors(values) for name, values in columns.items()}


def _column(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def tables_report(num_steps: int, shift: float, eta: float, last_step: str) -> str:
    """All tables of one setting, as Markdown."""
    setting, options = (num_steps, shift, eta), {"last_step": last_step}
    parts = [f"{num_steps} steps, shift {shift:g}, eta {eta:g}, last_step {last_step}"]
    stds = std_table(*setting, **options)
    parts += ["Standard deviation of each step", _table(stds, ".4f")]
    parts += ["Injected variance, the sum of std^2, and the eta of equal variance", _matches(stds, *setting, last_step)]
    parts += ["Gradient norm N_t of the log-probability", _table(grad_norm_table(*setting, **options), ".4g")]
    parts += ["Equalizer factor S_t = median(N) / N_t", _table(equalizer_table(*setting, **options), ".4g")]
    columns = {"sigma": stds["sigma"]}
    for regime in REGIMES:
        table = std_table(*setting, sde_types=("sage_grpo", "flow_grpo"), regime=regime, **options)
        columns |= {f"{name} {regime}": values for name, values in table.items() if name != "sigma"}
    differs = [i for i, (_, *row) in enumerate(zip(*columns.values())) if len(set(map(float, row))) > 2]
    columns = {name: values[: max(differs, default=0) + 2] for name, values in columns.items()}
    parts += [
        "Standard deviation of sage and flow in the regimes of Figure 9, which agree from the last step shown",
        _table(columns, ".4f"),
    ]
    return "\n\n".join(parts)


def _matches(stds: dict[str, Tensor], num_steps: int, shift: float, eta: float, last_step: str) -> str:
    rows = []
    for name in SDE_TYPES:
        try:
            match = matched_eta(f"sage_grpo:{eta}", name, num_steps=num_steps, shift=shift, last_step=last_step)
        except ValueError:  # more than cps can
            match = math.nan
        rows.append([name, f"{stds[name].square().sum():.4f}", f"{match:.4f}"])
    return _markdown(["SDE", f"variance at eta {eta:g}", f"eta with that of sage_grpo:{eta:g}"], rows)


def marginals_report(shift: float, eta: float) -> str:
    """How far a two-peaked density ends from where it should: by the number of steps, and on schedules as run."""
    cases = [(name, lambda width: 1.0) for name in SDE_TYPES[:-1]]
    cases += [("cps", lambda width: 0.5), ("cps", falling_eta)]
    labels = ["sage_grpo, eta 1", "flow_grpo, eta 1", "dance_grpo, eta 1", "cps, eta 0.5", "cps, eta falling"]
    rows = []
    for label, (sde_type, eta_of_width) in zip(labels, cases):
        errors = [interior_error(sde_type, num_steps, eta_of_width, TWO_PEAKS) for num_steps in (16, 32, 64)]
        rates = [f"{math.log2(error / half):.2f}" for error, half in zip(errors, errors[1:])]
        rows.append([label, *(f"{error:.4f}" for error in errors), ", ".join(rates)])
    parts = ["Total variation distance from the marginal, even steps from sigma 0.95 to 0.2"]
    parts += [_markdown(["SDE", "16 steps", "32 steps", "64 steps", "rate"], rows)]
    rows = []
    for num_steps in (10, 20, 40, 60):
        levels = shifted_levels(num_steps, shift)
        steps = [schedule(sde_type, levels, eta, "stochastic") for sde_type in SDE_TYPES]
        rows.append([str(num_steps), *(_error_or_gap(those[:-1], levels[:-1]) for those in steps)])
    parts += [f"The same on the schedule of shift {shift:g} before its last step, all at eta {eta:g}"]
    return "\n\n".join([*parts, _markdown(["steps", *SDE_TYPES], rows)])


def _error_or_gap(steps: Sequence[Transition], levels: Sequence[float]) -> str:
    if min(step.std for step in steps) < LEAST_STD:  # deterministic, or too fine for the grid
        return "-"
    return f"{marginal_error(steps, levels, TWO_PEAKS):.4f}"


def _table(columns: dict[str, Tensor], spec: str) -> str:
    rows = [[str(i + 1), *(f"{value:{spec}}" for value in row)] for i, row in enumerate(zip(*columns.values()))]
    return _markdown(["step", *columns], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables of the four SDEs, and a search for bad steps.")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    parser.add_argument("--shift", type=float, default=5.0)
    parser.add_argument("--eta", type=float, default=0.5, help="exploration scale, the same for all four")
    parser.add_argument("--last_step", choices=("stochastic", "deterministic"), default="stochastic")
    parser.add_argument("--search", action="store_true", help="look for bad steps in a grid of settings instead")
    parser.add_argument("--marginals", action="store_true", help="measure how well densities are kept instead")
    options = parser.parse_args(argv)
    if options.steps < 2 or not 0 < options.shift < math.inf or not 0 < options.eta <= 1:
        parser.error("--steps must be at least 2, --shift positive and --eta above 0 and at most 1")
    if options.search:
        head = ["SDE", "shift", "NaN or infinite", "deterministic", "std > 1"]
        print(_markdown(head, summary_rows(search())))
    elif options.marginals:
        print(marginals_report(options.shift, options.eta))
    else:
        print(tables_report(options.steps, options.shift, options.eta, options.last_step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
