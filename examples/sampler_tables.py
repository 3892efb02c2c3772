"""Print the noise, gradient norm and equalizer factor of each step of the built-in samplers.

The tables are float64, so that tests can use them without the rounding of the sampler. docs/sde.md shows them, and the
result of a search for bad steps. The regimes are those of Figure 9: `examples.sampler_figures.regime_stds`.
"""

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from examples.sampler_figures import REGIMES, regime_stds
from hyvideo.grpo.equalizer import balancing_factors
from hyvideo.schedulers.noise_matching import matched_eta
from hyvideo.schedulers.transitions import SAMPLERS, Transition, schedule, shifted_levels

SEARCH_STEPS = range(4, 201)
SEARCH_SHIFTS = (1.0, 3.0, 5.0, 7.0, 9.0)
SEARCH_ETAS = (0.1, 0.25, 0.5, 0.7, 0.9, 1.2)  # from well below to well above published recipes


def std_table(
    num_steps: int = 20,
    shift: float = 5.0,
    eta: float = 0.5,
    *,
    sde_types: Sequence[str] = SAMPLERS,
    regime: str = "own",
    last_step: str = "stochastic",
) -> dict[str, Tensor]:
    """Return columns by name: ``sigma``, and standard deviations for each SDE, 0 for deterministic steps.

    ``regime`` is the treatment of the pole, from ``REGIMES``; those other than ``own`` exist for sage and flow only.
    Shape of each column: (steps,).
    """
    levels = shifted_levels(num_steps, shift)
    columns = {"sigma": _column(levels[:-1])}
    for sde_type in sde_types:
        columns[sde_type] = _column(regime_stds(sde_type, levels, eta, regime))
        columns[sde_type][-1] *= last_step == "stochastic"
    return columns


def grad_norm_table(
    num_steps: int = 20,
    shift: float = 5.0,
    eta: float = 0.5,
    *,
    sde_types: Sequence[str] = SAMPLERS,
    last_step: str = "stochastic",
) -> dict[str, Tensor]:
    """Return columns like `std_table` with ``N_t``, the norm of the log-probability's gradient. Shape: (steps,)."""
    levels = shifted_levels(num_steps, shift)
    columns = {"sigma": _column(levels[:-1])}
    for sde_type in sde_types:
        steps = schedule(sde_type, levels, eta, last_step)
        columns[sde_type] = _column(SAMPLERS[sde_type].log_prob_grad_norm(step) for step in steps)
    return columns


def equalizer_table(num_steps: int = 20, shift: float = 5.0, eta: float = 0.5, **options) -> dict[str, Tensor]:
    """Return columns like `std_table` with the equalizer's factors ``S_t = median(N) / N_t``. Shape: (steps,)."""
    columns = grad_norm_table(num_steps, shift, eta, **options)
    return {name: values if name == "sigma" else balancing_factors(values) for name, values in columns.items()}


def _column(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def tables_report(num_steps: int, shift: float, eta: float, last_step: str) -> str:
    """Return Markdown of all tables for one setting."""
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
    for name in SAMPLERS:
        try:
            match = matched_eta(f"sage_grpo:{eta}", name, num_steps=num_steps, shift=shift, last_step=last_step)
        except ValueError:  # more noise than cps can add
            match = math.nan
        rows.append([name, f"{stds[name].square().sum():.4f}", f"{match:.4f}"])
    return markdown_table(["SDE", f"variance at eta {eta:g}", f"eta with the variance of sage_grpo:{eta:g}"], rows)


class BadStep(NamedTuple):
    """An unexpected step of a sampler, and its place."""

    kind: str  # `not finite`, `deterministic` (std 0) or `exploding` (std above 1, that of pure noise)
    sde_type: str
    shift: float
    eta: float
    num_steps: int
    place: int

    @property
    def name(self) -> str:
        return "last" if self.place == self.num_steps - 1 else f"step {self.place + 1}"


def search(
    steps: Iterable[int] = SEARCH_STEPS,
    shifts: Iterable[float] = SEARCH_SHIFTS,
    etas: Iterable[float] = SEARCH_ETAS,
    sde_types: Iterable[str] = SAMPLERS,
) -> Iterator[BadStep]:
    """Yield every bad step of every schedule in the grid, without etas above a sampler's maximum.

    Bad steps are at the boundaries: the pole of sage and flow at sigma = 1, and sigma' = 0, where cps adds no noise.
    """
    for sde_type, shift, num_steps, eta in itertools.product(sde_types, shifts, steps, etas):
        if eta > SAMPLERS[sde_type].max_eta:
            continue
        for place, step in enumerate(schedule(sde_type, shifted_levels(num_steps, shift), eta, "stochastic")):
            if kind := _bad_kind(step):
                yield BadStep(kind, sde_type, shift, eta, num_steps, place)


def _bad_kind(step: Transition) -> str | None:
    if not (math.isfinite(step.a) and math.isfinite(step.b) and math.isfinite(step.std)):
        return "not finite"
    if step.std == 0:
        return "deterministic"
    return "exploding" if step.std > 1 else None


def search_report(bad_steps: Iterable[BadStep]) -> str:
    """Return Markdown of the bad steps of each SDE and shift, with the range of step counts: `step 1: 68-200`."""
    by_cell: dict[tuple, dict[str, list[int]]] = {}
    for bad in bad_steps:
        where = f"eta {bad.eta:g}" if bad.kind == "exploding" else bad.name
        by_cell.setdefault((bad.sde_type, bad.shift, bad.kind), {}).setdefault(where, []).append(bad.num_steps)
    rows: list[list[str]] = []
    for sde_type, shift in itertools.product(SAMPLERS, SEARCH_SHIFTS):
        cells = [by_cell.get((sde_type, shift, kind), {}) for kind in ("not finite", "deterministic", "exploding")]
        ranges = ["; ".join(f"{where}: {min(n)}-{max(n)}" for where, n in cell.items()) or "none" for cell in cells]
        if rows and [rows[-1][0], *rows[-1][2:]] == [sde_type, *ranges]:
            rows[-1][1] += f", {shift:g}"
        else:
            rows.append([sde_type, f"{shift:g}", *ranges])
    return markdown_table(["SDE", "shift", "NaN or infinite", "deterministic", "std > 1"], rows)


def _table(columns: dict[str, Tensor], spec: str) -> str:
    rows = [[str(i + 1), *(f"{value:{spec}}" for value in row)] for i, row in enumerate(zip(*columns.values()))]
    return markdown_table(["step", *columns], rows)


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_steps", type=int, default=20, help="default: 20")
    parser.add_argument("--shift", type=float, default=5.0, help="default: 5")
    parser.add_argument("--eta", type=float, default=0.5, help="default: 0.5")
    parser.add_argument("--last_step", default="stochastic", choices=("stochastic", "deterministic"))
    options = parser.parse_args()
    print(tables_report(options.num_steps, options.shift, options.eta, options.last_step))


if __name__ == "__main__":
    main()
