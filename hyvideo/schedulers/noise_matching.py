"""Eta at which one SDE injects as much noise as another: baselines compared at equal exploration.

At one eta the four SDEs explore very differently (docs/sde.md). ``match_noise: "sage_grpo:0.5"`` asks for the eta at
which the run's SDE has the sum ``sum_t std_t^2`` of sage_grpo at eta 0.5, over the stochastic steps of the schedule.

For every SDE that sum is a share, which depends on eta alone, of the sum at eta 1, which depends on the schedule alone:

    sage_grpo, flow_grpo, dance_grpo    share = eta^2
    cps                                 share = sin^2(eta pi / 2)        at most 1, so cps has a maximum

so the eta is in closed form. It does not depend on the eta that was set before: matching twice changes nothing. Of a
run with a window the sum is over the window alone, in the mean over its places: the target's noise on fewer steps.
``match_noise: recommended`` takes the eta of the method's own video recipe; docs/sde.md has their sources.
"""

import math
from statistics import fmean

from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.transitions import SDE_TYPES, schedule, shifted_levels

RECOMMENDED_ETA = {"sage_grpo": 0.5, "dance_grpo": 0.25}  # DanceGRPO's own for video; the others have none
MAX_ETA = 1000.0  # far above all that explores; its square is a number still


def matched_eta(
    target: str, sde_type: str, *, num_steps: int, shift: float, last_step: str, sde_window: str = ""
) -> float:
    """Eta at which ``sde_type`` has, in its window, the total variance of ``target``, such as ``sage_grpo:0.5``.

    Raises: ValueError for a target that is malformed, or that ``sde_type`` cannot reach or has no recipe for, and for
        a window that does not fit.
    """
    if target == "recommended":
        if sde_type not in RECOMMENDED_ETA:
            known = ", ".join(RECOMMENDED_ETA)
            raise ValueError(f"match_noise recommended is known for {known}, and not for {sde_type}; set eta")
        return RECOMMENDED_ETA[sde_type]
    named, eta = parse_target(target)
    if sde_type not in SDE_TYPES:
        raise ValueError(f"sde_type must be one of {', '.join(SDE_TYPES)}, got {sde_type!r}")
    if num_steps < 1 or not 0 < shift < math.inf:
        raise ValueError(f"match_noise needs at least 1 step and a positive shift, got {num_steps} and {shift}")
    levels = shifted_levels(num_steps, shift)
    target_variance = total_variance(named, levels, eta, last_step)
    at_one = total_variance(sde_type, levels, 1.0, last_step, sde_window)
    where = f"at {num_steps} steps with shift {shift:g} and last_step {last_step}"
    if target_variance == 0 or at_one == 0:
        name = sde_type if target_variance else named
        raise ValueError(f"match_noise {target} cannot be reached: {name} injects no noise {where}; raise the steps")
    share = target_variance / at_one
    if sde_type != "cps":
        return math.sqrt(share)
    if share > 1 + 1e-12:  # cps at eta 1 may be matched with itself
        raise ValueError(
            f"match_noise {target} cannot be reached: it injects a variance of {target_variance:.4g} {where}, and cps "
            f"at most {at_one:.4g}{sde_window and f' in sde_window {sde_window}'}, at eta 1; lower the eta of {named}"
        )
    return 2 / math.pi * math.asin(math.sqrt(min(share, 1.0)))


def total_variance(sde_type: str, levels: tuple[float, ...], eta: float, last_step: str, sde_window: str = "") -> float:
    """``sum_t std_t^2`` over the stochastic steps, or over a window of them in the mean over its places.

    Raises: ValueError for a window that does not fit.
    """
    variances = [step.std**2 for step in schedule(sde_type, levels, eta, last_step) if step.is_stochastic]
    window = parse_window(sde_window, len(variances))
    return fmean(window.sums(variances)) if window else sum(variances)


def parse_target(target: str) -> tuple[str, float]:
    """SDE and eta of ``<sde_type>:<eta>``. Raises ValueError."""
    name, _, number = target.partition(":")
    try:
        eta = float(number)
    except ValueError:
        eta = math.nan
    if name not in SDE_TYPES or not 0 < eta <= (1 if name == "cps" else MAX_ETA):
        raise ValueError(
            f"match_noise must be <sde_type>:<eta>, such as sage_grpo:0.5, with one of {', '.join(SDE_TYPES)} and an "
            f"eta above 0, at most {MAX_ETA:g} and within [0, 1] for cps, got {target!r}"
        )
    return name, eta
