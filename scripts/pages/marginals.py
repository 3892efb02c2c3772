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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.schedulers.transitions import SAMPLERS, Transition

GRID_LIMIT = 5.0
LEAST_STD = 0.006


def eta_1(width: float) -> float:
    return 1.0


def eta_half(width: float) -> float:
    return 0.5


def eta_of_width(width: float) -> float:
    return width


def falling_eta(width: float) -> float:
    """Return the eta at which cps replaces a share ``sin^2(eta pi / 2) = width`` of the predicted
    noise.

    Then ``std^2 = sigma'^2 width`` and the mean is the Euler step plus ``sigma^2 width / 2`` times
    the score, to first order in the width: cps is the marginal-preserving SDE with diffusion
    coefficient ``sigma``. At a fixed eta, the share of the predicted noise that is replaced by
    fresh noise does not shrink with the step. Only the predicted noise depends on the predicted
    data, so the error of the replacement does not shrink either.
    """
    return 2 / math.pi * math.asin(math.sqrt(width))


Eta = Callable[[float], float]  # of the width of a step
# By sampler: label -> eta. The last one keeps the marginals to first order.
ETAS: dict[str, dict[str, Eta]] = {name: {"eta 1": eta_1} for name in SAMPLERS} | {
    "cps": {"eta 0.5": eta_half, "eta falling": falling_eta},
    "anchored": {"eta falling": eta_of_width},
}


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


def interior_error(sde_type: str, num_steps: int, eta: Eta, data: Mixture) -> float:
    """Return `marginal_error` over even steps from 0.95 to 0.2, where the error has a rate in the
    step width.
    """
    levels = [0.95 - 0.75 * i / num_steps for i in range(num_steps + 1)]
    pairs = list(zip(levels, levels[1:]))
    steps = [
        SAMPLERS[sde_type].transition(*pair, eta(pair[0] - pair[1]), levels[1]) for pair in pairs
    ]
    return marginal_error(steps, levels, data)
