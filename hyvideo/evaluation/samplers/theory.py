"""What the figures say without any run: gradient scale of each step, and noise of each step in three conventions.

At sigma = 1 the diffusion coefficient of sage and flow has a pole, and what a sampler does there is a convention.
"""

import math
from dataclasses import dataclass

from hyvideo.schedulers.transitions import (
    SAGE_SIGMA_MAX,
    flow_variance,
    log_prob_grad_norm,
    sage_variance,
    schedule,
    shifted_levels,
)


@dataclass(frozen=True)
class Sampler:
    """The paper's by default."""

    num_steps: int = 20
    shift: float = 5.0
    eta: float = 0.5
    last_step: str = "stochastic"

    @property
    def name(self) -> str:
        return f"{self.num_steps} steps, shift {self.shift:g}, eta {self.eta:.3g}"

    @property
    def levels(self) -> tuple[float, ...]:
        return shifted_levels(self.num_steps, self.shift)


@dataclass(frozen=True)
class GradientScale:
    """Of the stochastic steps of a sampler, in their order."""

    sigmas: list[float]
    norms: list[float]  # |d log_prob / d v|
    inverse_std: list[float]  # 1 / std


def gradient_scale(sde_type: str, sampler: Sampler) -> GradientScale:
    """The scale of the log-probability's gradient at each noise level, and the rule 1 / std."""
    levels = sampler.levels
    steps = schedule(sde_type, levels, sampler.eta, sampler.last_step)
    stochastic = [(sigma, step) for sigma, step in zip(levels, steps) if step.is_stochastic]
    return GradientScale(
        [sigma for sigma, _ in stochastic],
        [log_prob_grad_norm(sde_type, step) for _, step in stochastic],
        [1 / step.std for _, step in stochastic],
    )


REGIMES = {
    "a": "both begin at the second level",
    "b": f"both clamped at sigma {SAGE_SIGMA_MAX}",
    "c": "each with its own default",
}


def noise_in_regime(regime: str, sampler: Sampler) -> dict[str, list[float]]:
    """Standard deviation of each step of sage and flow under a convention for the first one.

    a: the second level stands in for sigma = 1, where sage's interval has no width and its std is 0;
    b: sigma is clamped for both where sage clamps it, and flow's first std is large;
    c: sage is clamped, flow takes the second level.
    """
    if regime not in REGIMES:
        raise ValueError(f"the regime must be of {', '.join(REGIMES)}, got {regime!r}")
    levels, eta, second = sampler.levels, sampler.eta, sampler.levels[1]
    sage, flow = [], []
    for sigma, below in zip(levels, levels[1:]):
        begin = second if regime == "a" and sigma == 1 else sigma
        sage.append(sage_variance(begin, below, eta, second))
        flow.append(flow_variance(sigma, below, eta, SAGE_SIGMA_MAX if regime == "b" else second))
    return {"sage_grpo": _roots(sage), "flow_grpo": _roots(flow)}


def _roots(variances: list[float]) -> list[float]:
    return [math.sqrt(max(variance, 0.0)) for variance in variances]
