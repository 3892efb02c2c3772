"""One stochastic step of each sampler as an affine Gaussian transition, ``x' ~ N(a x + b v, std^2)``.

``x`` is the noisy latent at level ``sigma``, ``v`` the predicted velocity (an estimate of noise - data), ``x'`` the
latent at the next, smaller level. A marginal-preserving reverse SDE that injects variance ``V`` over the step has

    mean = x + (sigma' - sigma) v + (V / 2) score        score = -(x + (1 - sigma) v) / sigma

so ``sage_grpo``, ``flow_grpo`` and ``dance_grpo`` differ in ``V`` alone. ``cps`` (coefficient-preserving sampling) is
its own transition. All of it is computed in Python floats: in float32 the variance of sage cancels.
``SAMPLERS`` declares the built-in samplers; docs/add_a_sampler.md shows how to add one.
Source: SAGE-GRPO, arXiv:2603.21872; method.md, 2 to 4.
"""

import functools
import math
import os
import runpy
from collections.abc import Callable
from dataclasses import dataclass

# g^2 of sage has a pole at sigma = 1, where every schedule starts. Its integral is taken no closer to the pole than
# this. What happens there is a convention, and with coarse steps a visible one.
SAGE_SIGMA_MAX = 0.997
MAX_ETA = 1000.0  # far above all that explores; its square is a number still


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
    """The exact integral of ``eta^2 s / (1 - s)`` over the step, 0 where both levels are at or above the clamp."""
    if sigma_next >= sigma_max:
        return 0.0
    log_ratio = math.log((1 - sigma_next) / (1 - min(sigma, sigma_max)))
    return max(eta**2 * (log_ratio - (sigma - sigma_next)), 0.0)  # just below the clamp the width is the larger


def flow_variance(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> float:
    """The left endpoint of ``eta^2 s / (1 - s)`` times the width; at the pole the second level stands in for 1."""
    return left_endpoint_variance(sigma, sigma_next, eta, sigma if sigma < 1 else sigma_after_first)


def left_endpoint_variance(sigma: float, sigma_next: float, eta: float, sigma_at_pole: float) -> float:
    """``eta^2 sigma / (1 - sigma) (sigma - sigma')`` with ``sigma_at_pole`` in the denominator."""
    return eta**2 * sigma / (1 - sigma_at_pole) * (sigma - sigma_next)


def dance_variance(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> float:
    """A constant diffusion coefficient times the width."""
    return eta**2 * (sigma - sigma_next)


def cps_transition(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> Transition:
    """``mean = (1 - sigma') x0_hat + sqrt(sigma'^2 - std^2) x1_hat`` with ``std = sigma' sin(eta pi / 2)``."""
    std = sigma_next * math.sin(eta * math.pi / 2)
    if std <= 0:
        return ode_transition(sigma, sigma_next)
    kept = math.sqrt(max(sigma_next**2 - std**2, 0.0))
    return Transition(a=(1 - sigma_next) + kept, b=-sigma * (1 - sigma_next) + (1 - sigma) * kept, std=std)


@dataclass(frozen=True, eq=False)
class Sampler:
    """A stochastic sampler: everything that the rest of the program knows about it."""

    label: str  # in figures and tables
    step: Callable[[float, float, float, float], float | Transition]
    """From (sigma, sigma_next, eta, sigma_after_first) to the variance of a marginal-preserving SDE, or a transition.

    ``sigma_after_first`` is the second level of the schedule.
    """
    max_eta: float = MAX_ETA
    recommended_eta: float | None = None  # of the method's own video recipe
    is_normalised: bool = True  # False: the log-probability is ``-(x' - mean)^2``, without ``1 / (2 std^2)``

    def transition(self, sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> Transition:
        """Return the step from ``sigma`` to ``sigma_next``. Raises ValueError where ``step`` returns none."""
        given = f"for sigma={sigma:.6g}, sigma_next={sigma_next:.6g}, eta={eta:.6g}, {sigma_after_first=:.6g}"
        try:
            made = self.step(sigma, sigma_next, eta, sigma_after_first)
        except (Exception, SystemExit) as error:  # of a user's code
            raise ValueError(f"raised {type(error).__name__}: {error}, {given}") from error
        numbers = (made.a, made.b, made.std) if isinstance(made, Transition) else (made,)
        if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers) or numbers[-1] < 0:
            rule = "it must return a finite variance >= 0, or a Transition of finite a, b and std with std >= 0"
            raise ValueError(f"returned {made!r:.80} {given}; {rule}")
        if isinstance(made, Transition):
            return made
        if made == 0:
            return ode_transition(sigma, sigma_next)
        a = 1 - made / (2 * sigma)
        b = (sigma_next - sigma) - made / 2 * (1 - sigma) / sigma
        return Transition(a, b, math.sqrt(made))

    def log_prob_scale(self, step: Transition) -> float:
        """The log-probability's slope in the mean, in units of that of the normalised Gaussian."""
        return 1.0 if self.is_normalised else 2 * step.std**2

    def log_prob_grad_norm(self, step: Transition) -> float:
        """Scale of the gradient of the log-probability with respect to the velocity; 0 for a deterministic step.

        ``|d mean / d v| / std`` for a normalised Gaussian, ``2 |d mean / d v| std`` without ``1 / (2 std^2)``.
        """
        if not step.is_stochastic:
            return 0.0
        return abs(step.b) / step.std if self.is_normalised else 2 * abs(step.b) * step.std


SAMPLERS = {
    "sage_grpo": Sampler("SAGE-GRPO", sage_variance, recommended_eta=0.5),
    "flow_grpo": Sampler("FlowGRPO", flow_variance),
    "dance_grpo": Sampler("DanceGRPO", dance_variance, recommended_eta=0.25),  # its recipe for HunyuanVideo
    "cps": Sampler("CPS", cps_transition, max_eta=1.0, is_normalised=False),
}


def sampler_of(sde_type: str) -> Sampler:
    """Return a built-in sampler by its name, or that of ``FILE.py:NAME``, whose code is run once.

    Raises ValueError for an unknown name, for code that cannot be run, and for code without such a function.
    """
    if sde_type in SAMPLERS:
        return SAMPLERS[sde_type]
    file, _, name = sde_type.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"sde_type must be one of {', '.join(SAMPLERS)}, or FILE.py:NAME, got {sde_type!r}")
    return _sampler_of_file(os.path.realpath(file), name)


@functools.cache
def _sampler_of_file(file: str, name: str) -> Sampler:
    try:
        named = runpy.run_path(file).get(name)
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(f"sde_type {file}:{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(named) and not isinstance(named, Sampler):
        raise ValueError(f"sde_type {file}:{name} must name a function or a Sampler in that file, got {named!r:.80}")
    return named if isinstance(named, Sampler) else Sampler(name, named)


def shifted_levels(num_steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels from 1 to 0: an even grid u under ``shift u / (1 + (shift - 1) u)``. Shape: (num_steps + 1,)."""
    even = [1 - i / num_steps for i in range(num_steps + 1)]
    # shift u + (1 - u) and not 1 + (shift - 1) u: exact at both ends, where a rounded 1 would miss the pole.
    return tuple(shift * u / (shift * u + (1 - u)) for u in even)


def schedule(sde_type: str, levels: tuple[float, ...], eta: float, last_step: str) -> tuple[Transition, ...]:
    """All steps down the levels. ``last_step`` is ``stochastic``, or ``deterministic`` to end at x0_hat.

    Raises: ValueError as `sampler_of`, for an eta that the sampler does not have, and for a step that is none.
    """
    return _schedule(sde_type, sampler_of(sde_type), levels, eta, last_step)


@functools.lru_cache(maxsize=256)
def _schedule(
    sde_type: str, sampler: Sampler, levels: tuple[float, ...], eta: float, last_step: str
) -> tuple[Transition, ...]:
    if not 0 <= eta <= sampler.max_eta:
        raise ValueError(f"eta must be within [0, {sampler.max_eta:g}] for {sde_type}, got {eta}")
    steps = []
    for sigma, sigma_next in zip(levels, levels[1:]):
        try:
            steps.append(sampler.transition(sigma, sigma_next, eta, levels[1]))
        except ValueError as error:
            raise ValueError(f"sde_type {sde_type}, step {len(steps) + 1} of {len(levels) - 1}: {error}") from error
    if last_step == "deterministic":
        steps[-1] = ode_transition(*levels[-2:])
    return tuple(steps)
