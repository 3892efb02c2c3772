"""Eta at which one sampler injects as much noise as another: baselines compared at equal exploration.

At one eta the samplers explore very differently (docs/sde.md). ``match_noise: "sage_grpo:0.5"`` asks for the eta at
which the run's sampler has the sum ``sum_t std_t^2`` of sage_grpo at eta 0.5, over the stochastic steps.

Bisection finds that eta for any sampler whose sum increases with eta. The result does not depend on the eta that was
set before: matching twice changes nothing. In a run with a window the sum is over the window, averaged over its
positions. ``match_noise: recommended`` takes the eta of the method's own video recipe; docs/sde.md has the sources.
"""

import itertools
import math
from collections.abc import Callable
from statistics import fmean

from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import MAX_ETA, SAMPLERS, sampler_of, schedule, shifted_levels


def matched_eta(
    target: str, sde_type: str, *, num_steps: int, shift: float, last_step: str, sde_window: str = ""
) -> float:
    """Eta at which ``sde_type`` has, in its window, the total variance of ``target``, such as ``sage_grpo:0.5``.

    Raises: ValueError for a target that is malformed, or that ``sde_type`` cannot reach or has no recipe for, for a
        variance that does not increase with eta, and for a window that does not fit.
    """
    sampler = sampler_of(sde_type)
    if target == "recommended":
        if sampler.recommended_eta is None:
            known = ", ".join(name for name, built_in in SAMPLERS.items() if built_in.recommended_eta is not None)
            raise ValueError(f"match_noise recommended is known for {known}, and not for {sde_type}; set eta")
        return sampler.recommended_eta
    named, target_eta = parse_target(target)
    if num_steps < 1 or not 0 < shift < math.inf:
        raise ValueError(f"match_noise needs at least 1 step and a positive shift, got {num_steps} and {shift}")
    levels = shifted_levels(num_steps, shift)
    wanted = total_variance(named, levels, target_eta, last_step)
    variances = _variances_around(
        wanted, lambda eta: total_variance(sde_type, levels, eta, last_step, sde_window), sampler.max_eta
    )
    found, most = min(variances, key=lambda eta: abs(variances[eta] - wanted)), max(variances.values())
    where = f"at {num_steps} steps with shift {shift:g} and last_step {last_step}"
    if wanted == 0 or most == 0:
        name = sde_type if wanted else named
        raise ValueError(f"match_noise {target} cannot be reached: {name} injects no noise {where}; raise the steps")
    for (eta, variance), (larger, after) in itertools.pairwise(sorted(variances.items())):
        if after < variance * (1 - 1e-9):  # less is rounding
            raise ValueError(
                f"match_noise needs a variance that increases with eta, and that of {sde_type} falls from "
                f"{variance:.4g} at eta {eta:.4g} to {after:.4g} at eta {larger:.4g}; set eta"
            )
    if not math.isclose(variances[found], wanted, rel_tol=1e-9):
        inside = sde_window and f" in sde_window {sde_window}"
        words = f"at most {most:.4g}{inside}, at eta {max(variances):g}; lower the eta of {named}"
        words = words if most < wanted else f"jumps past it at eta {found:.4g}; set eta"
        raise ValueError(
            f"match_noise {target} cannot be reached: it injects a variance of {wanted:.4g} {where}, and "
            f"{sde_type} {words}"
        )
    return found


def _variances_around(wanted: float, variance: Callable[[float], float], max_eta: float) -> dict[float, float]:
    """Return variances by eta: of a grid up to an eta that has at least the wanted one, and of a bisection for it."""
    high = min(1.0, max_eta)
    while high < max_eta and variance(high) < wanted:
        high = min(2 * high, max_eta)
    variances = {high * part / 16: variance(high * part / 16) for part in range(1, 17)}
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        variances[middle] = variance(middle)
        low, high = (middle, high) if variances[middle] < wanted else (low, middle)
    return variances


def total_variance(sde_type: str, levels: tuple[float, ...], eta: float, last_step: str, sde_window: str = "") -> float:
    """``sum_t std_t^2`` over the stochastic steps, or over a window of them in the mean over its places.

    Raises: ValueError for a window that does not fit.
    """
    variances = [step.std**2 for step in schedule(sde_type, levels, eta, last_step) if step.is_stochastic]
    window = parse_window(sde_window, len(variances)) if variances else None
    return fmean(window.sums(variances)) if window else sum(variances)


def parse_target(target: str) -> tuple[str, float]:
    """Sampler and eta of ``<sde_type>:<eta>``. Raises ValueError, also as `sampler_of`."""
    name, _, number = target.rpartition(":")
    try:
        eta = float(number)
    except ValueError:
        eta = math.nan
    is_known = name in SAMPLERS or ".py:" in name
    max_eta = sampler_of(name).max_eta if is_known else MAX_ETA
    if not is_known or not 0 < eta <= max_eta:
        raise ValueError(
            f"match_noise must be <sde_type>:<eta>, such as sage_grpo:0.5, with one of {', '.join(SAMPLERS)} or "
            f"FILE.py:NAME and an eta above 0, at most {max_eta:g}, got {target!r}"
        )
    return name, eta
