"""One stochastic step of each SDE as an affine Gaussian transition, ``x' ~ N(a x + b v, std^2)``.

``x`` is the noisy latent at level ``sigma``, ``v`` the predicted velocity (an estimate of noise - data), ``x'`` the
latent at the next, smaller level. A marginal-preserving reverse SDE that injects variance ``V`` over the step has

    mean = x + (sigma' - sigma) v + (V / 2) score        score = -(x + (1 - sigma) v) / sigma

so ``sage_grpo``, ``flow_grpo`` and ``dance_grpo`` differ in ``V`` alone. ``cps`` (coefficient-preserving sampling) is
its own transition. All of it is computed in Python floats: in float32 the variance of sage cancels.
Source: SAGE-GRPO, arXiv:2603.21872; method.md, 2 to 4.
"""

import functools
import math
from dataclasses import dataclass

# g^2 of sage has a pole at sigma = 1, where every schedule starts. Its integral is taken no closer to the pole than
# this. What happens there is a convention, and with coarse steps a visible one.
SAGE_SIGMA_MAX = 0.997


@dataclass(frozen=True)
class Transition:
    """Coefficients of one step. ``std == 0`` says that it is deterministic."""

    a: float
    b: float
    std: float

    @property
    def is_stochastic(self) -> bool:
        return self.std > 0


def ode_transition(sigma: float, sigma_next: float) -> Transition:
    """The Euler step of the ODE ``dx = v dsigma``."""
    return Transition(a=1.0, b=sigma_next - sigma, std=0.0)


def sage_variance(
    sigma: float, sigma_next: float, eta: float, sigma_after_first: float, sigma_max: float = SAGE_SIGMA_MAX
) -> float:
    """The exact integral of ``eta^2 s / (1 - s)`` over the step. Not positive where both levels are above the clamp."""
    if sigma_next >= sigma_max:
        return 0.0
    log_ratio = math.log((1 - sigma_next) / (1 - min(sigma, sigma_max)))
    return eta**2 * (log_ratio - (sigma - sigma_next))


def flow_variance(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> float:
    """The left endpoint of ``eta^2 s / (1 - s)`` times the width; at the pole the second level stands in for 1."""
    return left_endpoint_variance(sigma, sigma_next, eta, sigma if sigma < 1 else sigma_after_first)


def left_endpoint_variance(sigma: float, sigma_next: float, eta: float, sigma_at_pole: float) -> float:
    """``eta^2 sigma / (1 - sigma) (sigma - sigma')`` with ``sigma_at_pole`` in the denominator."""
    return eta**2 * sigma / (1 - sigma_at_pole) * (sigma - sigma_next)


def dance_variance(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> float:
    """A constant diffusion coefficient times the width."""
    return eta**2 * (sigma - sigma_next)


VARIANCES = {"sage_grpo": sage_variance, "flow_grpo": flow_variance, "dance_grpo": dance_variance}
SDE_TYPES = (*VARIANCES, "cps")


def transition(sde_type: str, sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> Transition:
    """The step of ``sde_type`` from ``sigma`` to ``sigma_next``.

    ``flow_grpo`` puts ``sigma_after_first``, the second level of the schedule, in the place of ``sigma = 1``.
    """
    if sde_type == "cps":
        return _cps_transition(sigma, sigma_next, eta)
    variance = VARIANCES[sde_type](sigma, sigma_next, eta, sigma_after_first)
    if variance <= 0:
        return ode_transition(sigma, sigma_next)
    a = 1 - variance / (2 * sigma)
    b = (sigma_next - sigma) - variance / 2 * (1 - sigma) / sigma
    return Transition(a, b, math.sqrt(variance))


def _cps_transition(sigma: float, sigma_next: float, eta: float) -> Transition:
    """``mean = (1 - sigma') x0_hat + sqrt(sigma'^2 - std^2) x1_hat`` with ``std = sigma' sin(eta pi / 2)``."""
    std = sigma_next * math.sin(eta * math.pi / 2)
    if std <= 0:
        return ode_transition(sigma, sigma_next)
    kept = math.sqrt(max(sigma_next**2 - std**2, 0.0))
    return Transition(a=(1 - sigma_next) + kept, b=-sigma * (1 - sigma_next) + (1 - sigma) * kept, std=std)


def log_prob_grad_norm(sde_type: str, step: Transition) -> float:
    """Scale of the gradient of the log-probability with respect to the velocity; 0 for a deterministic step.

    ``|d mean / d v| / std`` for a normalised Gaussian; cps drops ``1 / (2 std^2)`` and has ``2 |d mean / d v| std``.
    """
    if not step.is_stochastic:
        return 0.0
    return 2 * abs(step.b) * step.std if sde_type == "cps" else abs(step.b) / step.std


def shifted_levels(num_steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels from 1 to 0: an even grid u under ``shift u / (1 + (shift - 1) u)``. Shape: (num_steps + 1,)."""
    even = [1 - i / num_steps for i in range(num_steps + 1)]
    # shift u + (1 - u) and not 1 + (shift - 1) u: exact at both ends, where a rounded 1 would miss the pole.
    return tuple(shift * u / (shift * u + (1 - u)) for u in even)


@functools.cache
def schedule(sde_type: str, levels: tuple[float, ...], eta: float, last_step: str) -> tuple[Transition, ...]:
    """All steps down the levels. ``last_step`` is ``stochastic``, or ``deterministic`` to end at x0_hat."""
    steps = [transition(sde_type, sigma, below, eta, levels[1]) for sigma, below in zip(levels, levels[1:])]
    if last_step == "deterministic":
        steps[-1] = ode_transition(*levels[-2:])
    return tuple(steps)
