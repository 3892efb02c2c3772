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
    # From (sigma, sigma_next, eta, second level of the schedule) to the variance of a marginal-preserving SDE, or to a
    # transition.
    step: Callable[[float, float, float, float], float | Transition]
    max_eta: float = MAX_ETA
    recommended_eta: float | None = None  # of the method's own video recipe
    is_normalised: bool = True  # False: the log-probability is -(x' - mean)^2, without 1 / (2 std^2)

    def transition(self, sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> Transition:
        """Return the step from ``sigma`` to ``sigma_next``. Raises ValueError if ``step`` does not return one."""
        try:
            made = self.step(sigma, sigma_next, eta, sigma_after_first)
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            raise ValueError(f"it raised {type(error).__name__}: {error}") from error
        step = made
        if isinstance(made, int | float) and made >= 0:
            b = (sigma_next - sigma) - made / 2 * (1 - sigma) / sigma
            step = Transition(a=1 - made / (2 * sigma), b=b, std=math.sqrt(made))
        numbers = (step.a, step.b, step.std) if isinstance(step, Transition) else (None,)
        are_finite = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        if not are_finite or step.b == 0 or step.std < 0:
            rule = "a finite variance >= 0, or a Transition with finite a, b and std, b != 0 and std >= 0"
            raise ValueError(f"it must return {rule}, got {made!r:.80}")
        return step

    def log_prob_scale(self, step: Transition) -> float:
        """Return the factor between the log-probability and that of the normalised Gaussian, without constants."""
        return 1.0 if self.is_normalised else 2 * step.std**2

    def log_prob_grad_norm(self, step: Transition) -> float:
        """Return the scale of the log-probability's gradient in the velocity: ``|b| / std``, or ``2 |b| std``."""
        if not step.is_stochastic:
            return 0.0
        return abs(step.b) / step.std if self.is_normalised else 2 * abs(step.b) * step.std


SAMPLERS = {
    "sage_grpo": Sampler("SAGE-GRPO", sage_variance, recommended_eta=0.5),
    "flow_grpo": Sampler("FlowGRPO", flow_variance),
    "dance_grpo": Sampler("DanceGRPO", dance_variance, recommended_eta=0.25),  # its recipe for video
    "cps": Sampler("CPS", cps_transition, max_eta=1.0, is_normalised=False),
}


def sampler_of(sde_type: str) -> Sampler:
    """Return the sampler of a built-in name or of ``FILE.py:NAME``, whose code runs once. Raises ValueError."""
    if sde_type in SAMPLERS:
        return SAMPLERS[sde_type]
    file, _, name = sde_type.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"sde_type must be one of {', '.join(SAMPLERS)} or FILE.py:NAME, got {sde_type!r}")
    return _sampler_of_file(os.path.realpath(file), name)


@functools.cache
def _sampler_of_file(file: str, name: str) -> Sampler:
    try:
        found = runpy.run_path(file).get(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"sde_type {file}:{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found) and not isinstance(found, Sampler):
        raise ValueError(f"sde_type {file}:{name} must name a function or a Sampler of the file, got {found!r:.80}")
    sampler = found if isinstance(found, Sampler) else Sampler(name, found)
    if not isinstance(sampler.max_eta, int | float) or not isinstance(sampler.label, str):
        raise ValueError(f"sde_type {file}:{name} needs a text as label and a number as max_eta, got {found!r:.80}")
    return sampler


def shifted_levels(num_steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels from 1 to 0: an even grid u under ``shift u / (1 + (shift - 1) u)``. Shape: (num_steps + 1,)."""
    even = [1 - i / num_steps for i in range(num_steps + 1)]
    # shift u + (1 - u) and not 1 + (shift - 1) u: exact at both ends, where a rounded 1 would miss the pole.
    return tuple(shift * u / (shift * u + (1 - u)) for u in even)


def schedule(sde_type: str, levels: tuple[float, ...], eta: float, last_step: str) -> tuple[Transition, ...]:
    """All steps down the levels. ``last_step`` is ``stochastic``, or ``deterministic`` to end at x0_hat.

    Raises: ValueError as `sampler_of`, for an illegal eta, and for a step that the sampler does not define.
    """
    return _schedule(sde_type, sampler_of(sde_type), levels, eta, last_step)


@functools.lru_cache(maxsize=256)
def _schedule(sde_type: str, sampler: Sampler, levels: tuple[float, ...], eta: float, last_step: str) -> tuple:
    if not 0 <= eta <= sampler.max_eta:
        raise ValueError(f"eta must be within [0, {sampler.max_eta:g}] for {sde_type}, got {eta}")
    steps, second = [], levels[1]
    for sigma, below in zip(levels, levels[1:]):
        try:
            steps.append(sampler.transition(sigma, below, eta, second))
        except ValueError as error:
            given = f"sigma={sigma:.4g}, sigma_next={below:.4g}, eta={eta:.4g}, sigma_after_first={second:.4g}"
            where = f"step {len(steps) + 1} of {len(levels) - 1} with {given}"
            raise ValueError(f"sde_type {sde_type} is not defined at {where}: {error}") from error
    if last_step == "deterministic":
        steps[-1] = ode_transition(*levels[-2:])
    return tuple(steps)
