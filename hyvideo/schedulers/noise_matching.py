"""Noise matching: the eta at which one SDE adds as much noise as another, for comparisons at equal
exploration.

At equal eta, samplers add very different amounts of noise (docs/sde.md).
``eta: sage_grpo:0.5`` is the eta at which the run's sampler has the total variance
``sum_t std_t^2`` of sage_grpo at eta 0.5, found by bisection. With an SDE window, the variance is
summed over the window and averaged over its positions.
"""

import functools
import math
from statistics import fmean

from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import (
    MAX_ETA,
    SAMPLERS,
    describe_levels,
    levels_of_steps,
    sampler_of,
    schedule,
)


@functools.lru_cache(maxsize=256)
def matched_eta(
    target: str,
    sde_type: str,
    *,
    num_steps: int,
    shift: float,
    last_step: str,
    sde_window: str = "",
    sigmas: str | None = None,
) -> float:
    """Return the eta at which ``sde_type`` has the total variance of ``target``, such as
    ``sage_grpo:0.5``.

    Raises ValueError if the target is malformed, if ``sde_type`` cannot reach it, or if schedule or
    window are invalid.
    """
    max_eta = sampler_of(sde_type).max_eta
    target_type, target_eta = parse_target(target)
    levels = levels_of_steps(num_steps, shift, sigmas)
    goal = total_variance(target_type, levels, target_eta, last_step)

    def variance(eta: float) -> float:
        return total_variance(sde_type, levels, eta, last_step, sde_window)

    low = 0.0
    high = min(1.0, max_eta)
    while high < max_eta and variance(high) < goal:
        high = min(2 * high, max_eta)
    while low < (middle := (low + high) / 2) < high:
        if variance(middle) < goal:
            low = middle
        else:
            high = middle
    found = min((low, high), key=lambda eta: abs(variance(eta) - goal))
    if goal > 0 and math.isclose(variance(found), goal, rel_tol=1e-9):
        return found
    inside = f" in sde_window {sde_window}" if sde_window else ""
    raise ValueError(
        f"eta {target} cannot be reached at {describe_levels(num_steps, shift, sigmas)} and "
        f"last_step {last_step}: its variance is {goal:.4g}, the nearest of {sde_type}{inside} is "
        f"{variance(found):.4g} at eta {found:.4g}; use more steps, another eta of {target_type}, or "
        "a number as eta"
    )


def total_variance(
    sde_type: str, levels: tuple[float, ...], eta: float, last_step: str, sde_window: str = ""
) -> float:
    """Return ``sum_t std_t^2`` over the stochastic steps, or over a window of them, averaged over
    its positions.
    """
    variances = [
        step.std**2 for step in schedule(sde_type, levels, eta, last_step) if step.is_stochastic
    ]
    window = parse_window(sde_window, len(variances)) if variances else None
    if window is None:
        return sum(variances)
    return fmean(window.sums(variances))


def parse_target(target: str) -> tuple[str, float]:
    """Return sampler and eta of ``SAMPLER:ETA``. Raises ValueError if malformed; a file of a sampler
    is not read.
    """
    name, _, number = target.rpartition(":")
    try:
        eta = float(number)
    except ValueError:
        eta = math.nan
    is_known = name in SAMPLERS or ".py:" in name
    if not is_known or not 0 < eta <= MAX_ETA:
        raise ValueError(
            "eta must be a number, or SAMPLER:ETA, such as sage_grpo:0.5, with a SAMPLER of "
            f"{', '.join(SAMPLERS)} or FILE.py:NAME and an ETA above 0, got {target!r}"
        )
    return name, eta
