"""Marginals of a sampler: a one-dimensional density, propagated through the steps without sampling.

For data from a mixture of normals, the marginal at every noise level and the velocity
``E[x1 - x0 | x]`` are known:

    x = (1 - sigma) x0 + sigma x1        x | component k ~ N((1 - sigma) m_k, (1 - sigma)^2 s^2 + sigma^2)

A stochastic step with mean ``f(x) = a x + b v(x)`` maps the density p to
``p'(y) = int p(x) N(y; f(x), std^2) dx``. On a grid finer than the standard deviation the sum for
that integral is exact to many digits, which leaves only the error of the sampler: the total
variation distance, half the integral of |p - marginal|, from 0 to 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.schedulers.transitions import SAMPLERS, Transition
from tests.schedulers.expected import expected_of

GRID_LIMIT = 5.0
LEAST_STD = 0.006


@dataclass(frozen=True)
class Mixture:
    """Equal mixture of normals with the given ``means`` and one standard deviation."""

    means: tuple[float, ...]
    std: float

    def density(self, x: Tensor, sigma: float) -> Tensor:
        """Return the density of the noisy data at level sigma. Shape: (points,)."""
        return self._log_parts(x, sigma).exp().mean(0)

    def velocity(self, x: Tensor, sigma: float) -> Tensor:
        """Return ``E[x1 - x0 | x]``. Shape: (points,)."""
        shares = self._log_parts(x, sigma).softmax(0)  # (components, points)
        whitened = (x - (1 - sigma) * self._centres) / self._variance(sigma)
        noise, data = sigma * whitened, self._centres + (1 - sigma) * self.std**2 * whitened
        return (shares * (noise - data)).sum(0)

    @property
    def _centres(self) -> Tensor:
        return torch.tensor(self.means, dtype=torch.float64)[:, None]  # (components, 1)

    def _variance(self, sigma: float) -> float:
        return (1 - sigma) ** 2 * self.std**2 + sigma**2

    def _log_parts(self, x: Tensor, sigma: float) -> Tensor:
        return log_normal(x, (1 - sigma) * self._centres, self._variance(sigma))


TWO_PEAKS = Mixture(means=(-1.0, 1.0), std=0.3)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(
        "| " + " | ".join(cells) + " |\n" for cells in [head, ["---"] * len(head), *rows]
    )


def log_normal(x: Tensor, mean: Tensor, variance: float) -> Tensor:
    return -((x - mean) ** 2) / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)


def marginal_error(steps: Sequence[Transition], levels: Sequence[float], data: Mixture) -> float:
    """Return the total variation distance from the marginal at the last level, starting from that
    of the first level.

    Raises ValueError for a step with so little noise that it would need a too large grid.
    """
    narrowest = min(step.std for step in steps)
    if narrowest < LEAST_STD:
        raise ValueError(
            f"a standard deviation of {narrowest:.3g} is too fine for the grid: at least "
            f"{LEAST_STD}"
        )
    spacing = min(0.02, narrowest / 1.5)
    x = torch.arange(-GRID_LIMIT, GRID_LIMIT, spacing, dtype=torch.float64)
    density = data.density(x, levels[0])
    for step, sigma in zip(steps, levels):
        means = step.a * x + step.b * data.velocity(x, sigma)
        kernel = log_normal(x[:, None], means, step.std**2).exp_()  # (points after, points before)
        density = spacing * kernel @ density
    return 0.5 * spacing * (density - data.density(x, levels[-1])).abs().sum().item()


def interior_error(
    sde_type: str, num_steps: int, eta_of_width: Callable[[float], float], data: Mixture
) -> float:
    """Return `marginal_error` over even steps from 0.95 to 0.2, where the error has a rate in the
    step width.
    """
    levels = [0.95 - 0.75 * i / num_steps for i in range(num_steps + 1)]
    pairs = list(zip(levels, levels[1:]))
    steps = [
        SAMPLERS[sde_type].transition(*pair, eta_of_width(pair[0] - pair[1]), levels[1])
        for pair in pairs
    ]
    return marginal_error(steps, levels, data)


def marginals_table() -> str:
    """Return a Markdown table of the marginal error of two peaks by the number of even steps from
    0.95 to 0.2.
    """
    rows = []
    for sde_type in SAMPLERS:
        for label, eta_of_width in expected_of(sde_type).marginals.items():
            errors = [
                interior_error(sde_type, num_steps, eta_of_width, TWO_PEAKS)
                for num_steps in (16, 32, 64)
            ]
            rates = [f"{math.log2(error / half):.2f}" for error, half in zip(errors, errors[1:])]
            rows.append(
                [f"{sde_type}, {label}", *(f"{error:.4f}" for error in errors), ", ".join(rates)]
            )
    return markdown_table(["SDE", "16 steps", "32 steps", "64 steps", "rate"], rows)
