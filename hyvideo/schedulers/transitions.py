"""Stochastic steps of all samplers as affine Gaussian transitions, ``x' ~ N(a x + b v, std^2)``.

``x`` is the noisy latent at level ``sigma``, ``v`` the predicted velocity (an estimate of noise -
data), and ``x'`` the latent at the next, smaller level ``sigma'``. The step of a
marginal-preserving reverse SDE with variance ``V`` has

    mean = x + (sigma' - sigma) v + (V / 2) score        score = -(x + (1 - sigma) v) / sigma

``sage_grpo``, ``flow_grpo`` and ``dance_grpo`` differ only in ``V``. ``cps``
(coefficient-preserving sampling), ``precise`` and ``dance_precise`` recombine the predicted data
and the predicted noise. Coefficients are Python floats (float64): in float32, sage's variance
suffers from cancellation. ``SAMPLERS`` lists the built-in samplers; docs/extend.md#add-a-sampler shows how
to add one. Source: SAGE-GRPO, arXiv:2603.21872, Sections 3.1 and 3.2.1; docs/sde.md has the
formulas and their values.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hyvideo.files.custom_code import load_object

# The diffusion coefficient of sage has a pole at sigma = 1, where every schedule starts. Its
# integral is clamped here. This is a convention; with few steps it changes the noise of the first
# step noticeably (docs/sde.md).
SAGE_SIGMA_MAX = 0.997
MAX_ETA = 1000.0  # far above any useful value; its square is still finite


@dataclass(frozen=True)
class Transition:
    """Coefficients of one step, which is deterministic if ``std == 0``."""

    a: float
    b: float
    std: float
    # level up to which a flow map predicts the mean velocity; None: the next one
    until: float | None = None
    # standard deviation in KL terms; None: std
    kl_std: float | None = None

    @property
    def is_stochastic(self) -> bool:
        return self.std > 0


def ode_transition(sigma: float, sigma_next: float) -> Transition:
    """Return the Euler step of the ODE ``dx = v dsigma``."""
    return Transition(a=1.0, b=sigma_next - sigma, std=0.0)


def sage_variance(
    sigma: float,
    sigma_next: float,
    eta: float,
    sigma_after_first: float,
    sigma_max: float = SAGE_SIGMA_MAX,
) -> float:
    """Return ``eta^2 (log((1 - sigma') / (1 - min(sigma, sigma_max))) - (sigma - sigma'))``, at
    least 0.

    Below ``sigma_max`` this is the exact integral of ``eta^2 s / (1 - s)`` over the step.
    """
    if sigma_next >= sigma_max:
        return 0.0
    log_ratio = math.log((1 - sigma_next) / (1 - min(sigma, sigma_max)))
    return max(eta**2 * (log_ratio - (sigma - sigma_next)), 0.0)  # negative just below the clamp


def flow_variance(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> float:
    """Return ``eta^2 sigma / (1 - sigma) (sigma - sigma')``; at sigma = 1, the denominator uses the
    second level.
    """
    limit = sigma if sigma < 1 else sigma_after_first
    return left_endpoint_variance(sigma, sigma_next, eta, limit)


def left_endpoint_variance(
    sigma: float, sigma_next: float, eta: float, sigma_at_pole: float
) -> float:
    """Return ``eta^2 sigma / (1 - sigma_at_pole) (sigma - sigma')``."""
    return eta**2 * sigma / (1 - sigma_at_pole) * (sigma - sigma_next)


def dance_variance(sigma: float, sigma_next: float, eta: float, sigma_after_first: float) -> float:
    """Return ``eta^2 (sigma - sigma')``, the variance of a constant diffusion coefficient."""
    return eta**2 * (sigma - sigma_next)


def recombined(sigma: float, sigma_next: float, std: float) -> Transition:
    """Return the step ``(1 - sigma') x0_hat + sqrt(sigma'^2 - std^2) x1_hat + std noise``.

    The predicted data are x0_hat = x - sigma v, and the predicted noise x1_hat = x + (1 - sigma) v.
    """
    if std <= 0:
        return ode_transition(sigma, sigma_next)
    noise = math.sqrt(max(sigma_next**2 - std**2, 0.0))  # coefficient of x1_hat
    return Transition(
        a=(1 - sigma_next) + noise,
        b=-sigma * (1 - sigma_next) + (1 - sigma) * noise,
        std=std,
        kl_std=bounded_kl_std(sigma, sigma_next, std),
    )


def bounded_kl_std(sigma: float, sigma_next: float, std: float) -> float:
    """Return the standard deviation in KL terms of a step whose ``std`` is a share of ``sigma'``:
    the same share of at least half of the step width.

    Where sigma' is close to 0, as in the last levels of some schedules, the KL would otherwise grow
    with ``(sigma / sigma')^2`` (docs/sde.md). It is the ``std`` for all shifts of at least 1.
    """
    return std * max(1.0, (sigma - sigma_next) / (2 * sigma_next))


def cps_transition(
    sigma: float, sigma_next: float, eta: float, sigma_after_first: float
) -> Transition:
    """Return the step of coefficient-preserving sampling: `recombined` with ``std = sigma' sin(eta
    pi / 2)``.
    """
    return recombined(sigma, sigma_next, sigma_next * math.sin(eta * math.pi / 2))


def precise_transition(
    sigma: float, sigma_next: float, eta: float, sigma_after_first: float
) -> Transition:
    """Return the exact solution of flow_grpo's SDE over a step in which x0_hat does not change:
    `recombined` with ``std = sigma' sqrt(1 - rho^(eta^2))`` and ``rho`` the ratio of ``sigma' / (1 -
    sigma')`` and ``sigma / (1 - sigma)``.

    Source: Precise, arXiv:2605.23522. As for sage, sigma is clamped in rho: at sigma = 1 the
    published step replaces all noise, whatever eta is.
    """
    before, after = min(sigma, SAGE_SIGMA_MAX), min(sigma_next, SAGE_SIGMA_MAX)
    rho = min(1.0, after * (1 - before) / (before * (1 - after)))
    return recombined(sigma, sigma_next, sigma_next * math.sqrt(1 - rho ** (eta**2)))


def dance_precise_transition(
    sigma: float, sigma_next: float, eta: float, sigma_after_first: float
) -> Transition:
    """Return the exact solution of dance_grpo's SDE over a step in which x0_hat does not change:
    `recombined` with ``std = sigma' sqrt(1 - exp(-eta^2 (1 / sigma' - 1 / sigma)))``.
    """
    if sigma_next == 0:
        return ode_transition(sigma, sigma_next)
    kept = math.exp(-(eta**2) * (1 / sigma_next - 1 / sigma))
    return recombined(sigma, sigma_next, sigma_next * math.sqrt(1 - kept))


def reference_cps_transition(
    sigma: float, sigma_next: float, eta: float, sigma_after_first: float
) -> Transition:
    """Return `cps_transition`, with std 1e-12 in the last step, which the public reference also
    trains.
    """
    step = cps_transition(sigma, sigma_next, eta, sigma_after_first)
    return step if sigma_next > 0 or eta == 0 else replace(step, std=1e-12)


def anchored_transition(
    sigma: float, sigma_next: float, eta: float, sigma_after_first: float
) -> Transition:
    """Return a step along the path to the anchor level ``r = (1 - eta) sigma'`` and back to sigma'
    by new noise: ``x_r = x + (r - sigma) v``, ``x' = c x_r + sqrt(sigma'^2 - (c r)^2) noise`` with
    ``c = (1 - sigma') / (1 - r)``.

    With the mean velocity of a flow map up to r, the marginals are kept for any eta. Eta 0 is the
    ODE, and eta 1 predicts the data and adds noise. Source: arXiv:2607.00535.
    """
    anchor = (1 - eta) * sigma_next
    kept = (1 - sigma_next) / (1 - anchor)
    variance = sigma_next**2 - (kept * anchor) ** 2
    if variance <= 0:
        return ode_transition(sigma, sigma_next)
    std = math.sqrt(variance)
    kl_std = bounded_kl_std(sigma, sigma_next, std)
    return Transition(a=kept, b=kept * (anchor - sigma), std=std, until=anchor, kl_std=kl_std)


@dataclass(frozen=True, eq=False)
class Sampler:
    """A stochastic sampler: its step and its properties."""

    label: str  # in figures and tables
    # (sigma, sigma_next, eta, second level of the schedule) -> variance of a marginal-preserving
    # SDE, or a Transition
    step: Callable[[float, float, float, float], float | Transition]
    max_eta: float = MAX_ETA
    # False: the log-probability is -(x' - mean)^2, without 1 / (2 std^2)
    is_normalised: bool = True
    has_gaussian_norm: bool = False  # True: the equalizer uses |b| / std without is_normalised too
    # True: the KL to the anchor uses std^2 / (sigma - sigma') instead of std^2
    has_kl_per_sigma: bool = False

    def transition(
        self, sigma: float, sigma_next: float, eta: float, sigma_after_first: float
    ) -> Transition:
        """Return the step from ``sigma`` to ``sigma_next``.

        Raises ValueError if ``step`` is invalid there: a NaN would spoil the rollouts silently.
        """
        returned = self.step(sigma, sigma_next, eta, sigma_after_first)
        step = returned
        if not isinstance(returned, Transition):
            b = (sigma_next - sigma) - returned / 2 * (1 - sigma) / sigma
            std = math.sqrt(returned) if returned >= 0 else math.nan
            step = Transition(a=1 - returned / (2 * sigma), b=b, std=std)
        if not all(map(math.isfinite, (step.a, step.b, step.std))) or step.std < 0:
            raise ValueError(
                "it must return a finite variance >= 0, or a Transition with finite a, b and std, "
                f"and std >= 0, got {returned!r:.80}"
            )
        return step

    def log_prob_scale(self, step: Transition) -> float:
        """Return the log-probability divided by the Gaussian one, both without constants: 1, or
        ``2 std^2`` (cps).
        """
        return 1.0 if self.is_normalised else 2 * step.std**2

    def log_prob_grad_norm(self, step: Transition) -> float:
        """Return ``N_t``, the scale of the log-probability's gradient in v: ``|b| / std``, or
        ``2 |b| std`` (cps).
        """
        if not step.is_stochastic:
            return 0.0
        if self.is_normalised or self.has_gaussian_norm:
            return abs(step.b) / step.std
        return 2 * abs(step.b) * step.std


SAMPLERS = {
    "sage_grpo": Sampler("SAGE-GRPO", sage_variance),
    "flow_grpo": Sampler("FlowGRPO", flow_variance),
    "dance_grpo": Sampler("DanceGRPO", dance_variance),
    "cps": Sampler("CPS", cps_transition, max_eta=1.0, is_normalised=False),
    "precise": Sampler("Precise", precise_transition),
    "dance_precise": Sampler("DanceGRPO, precise", dance_precise_transition),
    "anchored": Sampler("Anchored", anchored_transition, max_eta=1.0),
}
# With `reference_conventions` (docs/appendix.md).
REFERENCE_SAMPLERS = SAMPLERS | {
    "flow_grpo": replace(SAMPLERS["flow_grpo"], has_kl_per_sigma=True),
    "cps": replace(SAMPLERS["cps"], step=reference_cps_transition, has_gaussian_norm=True),
}


def sampler_of(sde_type: str, reference_conventions: bool = False) -> Sampler:
    """Return a built-in sampler or the sampler of ``FILE.py:NAME``, a file that runs once.

    Raises ValueError if invalid.
    """
    if sde_type in SAMPLERS:
        samplers = REFERENCE_SAMPLERS if reference_conventions else SAMPLERS
        return samplers[sde_type]
    if ".py:" not in sde_type:
        raise ValueError(
            f"sde_type must be one of {', '.join(SAMPLERS)} or FILE.py:NAME, got {sde_type!r}"
        )
    found = load_object(sde_type, "sde_type")
    if isinstance(found, Sampler):
        return found
    return Sampler(sde_type.rpartition(":")[2], found)


def shifted_levels(num_steps: int, shift: float) -> tuple[float, ...]:
    """Return ``shift u / (1 + (shift - 1) u)`` for an even grid u from 1 to 0.

    Shape: (num_steps + 1,).
    """
    grid = [1 - i / num_steps for i in range(num_steps + 1)]
    # This denominator is exact at both ends. A first level rounded to less than 1 would not be
    # treated as the pole.
    return tuple(shift * u / (shift * u + (1 - u)) for u in grid)


def parse_sigmas(text: str | None) -> tuple[float, ...]:
    """Return the noise levels at which the steps begin, from text such as ``1,0.757,0.522``; none
    without text.

    Raises ValueError unless they decrease from 1 and are above 0.
    """
    if not text:
        return ()
    try:
        levels = tuple(float(word) for word in text.split(","))
    except ValueError:
        levels = (math.nan,)
    decreases = all(level > after for level, after in zip(levels, (*levels[1:], 0.0)))
    if levels[0] != 1 or not decreases:
        raise ValueError(
            "sigmas must be noise levels that decrease from 1, where sampling starts from pure "
            "noise, separated by commas and without the final 0, such as 1,0.757,0.522, got "
            f"{text!r:.80}"
        )
    return levels


def levels_of_steps(num_steps: int, shift: float, sigmas: str | None = None) -> tuple[float, ...]:
    """Return the levels of ``sigmas`` (`parse_sigmas`) and the final 0, or `shifted_levels` without
    them.

    Shape: (num_steps + 1,). Raises ValueError if ``sigmas`` has another number of steps.
    """
    given = parse_sigmas(sigmas)
    if not given:
        return shifted_levels(num_steps, shift)
    if len(given) != num_steps:
        raise ValueError(
            f"sigmas must have one noise level for each of the {num_steps} steps, got "
            f"{len(given)}: {sigmas}; set the number of steps to {len(given)}, or remove sigmas to "
            "compute the levels from shift"
        )
    return (*given, 0.0)


def refined_levels(
    num_steps: int, shift: float, sigmas: str | None, num_substeps: int
) -> tuple[float, ...]:
    """Return the levels of `levels_of_steps` with each step divided into ``num_substeps``.

    The new levels divide a step evenly before the shift. Without sigmas, they are those of
    ``num_steps * num_substeps`` shifted steps. Shape: (num_steps * num_substeps + 1,).
    """
    if not sigmas:
        return shifted_levels(num_steps * num_substeps, shift)
    return divided_levels(levels_of_steps(num_steps, shift, sigmas), shift, num_substeps)


def divided_levels(levels: tuple[float, ...], shift: float, num_substeps: int) -> tuple[float, ...]:
    """Return the levels with each step divided into ``num_substeps``, evenly before the shift."""
    unshifted = [level / (level + shift * (1 - level)) for level in levels]
    fine = []
    for level, start, end in zip(levels, unshifted, unshifted[1:]):
        fine.append(level)
        for substep in range(1, num_substeps):
            u = start + (end - start) * substep / num_substeps
            fine.append(shift * u / (shift * u + (1 - u)))
    return (*fine, 0.0)


def describe_levels(num_steps: int, shift: float, sigmas: str | None = None) -> str:
    """Return the levels of a schedule in words."""
    if sigmas:
        return f"{num_steps} steps with sigmas {sigmas}"
    return f"{num_steps} steps with shift {shift:g}"


def schedule(
    sde_type: str,
    levels: tuple[float, ...],
    eta: float,
    last_step: str,
    reference_conventions: bool = False,
) -> tuple[Transition, ...]:
    """Return all steps of a schedule.

    ``last_step`` is ``stochastic``, or ``deterministic`` to end at x0_hat.

    Raises ValueError if the sampler is invalid (`sampler_of`), eta is out of range, or a step is not
    defined.
    """
    return _schedule(sde_type, sampler_of(sde_type, reference_conventions), levels, eta, last_step)


@functools.lru_cache(maxsize=256)
def _schedule(
    sde_type: str, sampler: Sampler, levels: tuple[float, ...], eta: float, last_step: str
) -> tuple:
    if not 0 <= eta <= sampler.max_eta:
        raise ValueError(f"eta must be within [0, {sampler.max_eta:g}] for {sde_type}, got {eta}")
    steps = []
    second = levels[1]
    for sigma, sigma_next in zip(levels, levels[1:]):
        try:
            steps.append(sampler.transition(sigma, sigma_next, eta, second))
        except Exception as error:  # a user's code may raise anything
            given = (
                f"sigma={sigma:.4g}, sigma_next={sigma_next:.4g}, eta={eta:.4g}, "
                f"sigma_after_first={second:.4g}"
            )
            raise ValueError(
                f"sde_type {sde_type} is not defined at step {len(steps) + 1} of {len(levels) - 1} "
                f"with {given}: {error}"
            ) from error
    if last_step == "deterministic":
        steps[-1] = ode_transition(*levels[-2:])
    return tuple(steps)
