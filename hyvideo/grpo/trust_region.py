"""The trust region: distance to an anchor (position), distance to the rollout policy (velocity), and its coefficient.

Source: method.md, 7 and 8.
"""

import math
from collections import deque
from dataclasses import asdict, dataclass

from torch import Tensor

STRATEGIES = ("none", "fixed", "stepwise", "moving", "dual_moving", "dual_fixed")


def position_kl(mean: Tensor, anchor_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two Gaussians of equal variance: mean over elements of ``(mean - anchor)^2 / (2 std^2 + 1e-6)``.

    Shapes: (batch, ...) both means, (batch, 1, ..., 1) their std; (batch,) the result.
    """
    return ((mean - anchor_mean) ** 2 / (2 * std**2 + 1e-6)).flatten(1).mean(1)


def velocity_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """``log_prob_rollout - log_prob_new``, an unbiased estimate of the KL to the rollout policy. Shape: (batch,).

    With one update per round it is 0, with a gradient that is zero on average; the closed form is
    ``position_kl(mean, rollout_mean, std)``. Under cps, whose log-probability is ``-(x' - mean)^2``, it estimates
    ``2 std^2`` times the KL: at 20 steps, shift 5 and eta 0.5 that is 0.98 of it at the first and 0.04 at the last
    stochastic step. The closed form is the KL at every step.
    """
    return old_log_prob - log_prob


@dataclass(frozen=True)
class KLWeights:
    """Weights of the two distances in the loss: ``position * KL_pos + velocity * KL_vel``."""

    position: float
    velocity: float
    anchor_moves: bool


def kl_weights(strategy: str, *, dual_position: float = 1.0, dual_velocity: float = 0.1) -> KLWeights:
    """Weights of the two distances under a strategy's name."""
    weights = {
        "none": KLWeights(0.0, 0.0, False),
        "fixed": KLWeights(1.0, 0.0, False),
        "stepwise": KLWeights(0.0, 1.0, False),
        "moving": KLWeights(1.0, 0.0, True),
        "dual_moving": KLWeights(dual_position, dual_velocity, True),
        "dual_fixed": KLWeights(dual_position, dual_velocity, False),
    }
    if strategy not in weights:
        raise ValueError(f"the KL strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return weights[strategy]


@dataclass(frozen=True)
class KLScheduleSettings:
    """Rule of the coefficient beta of the KL term, which lies in [minimum, maximum] and starts at ``initial``."""

    schedule: str = "adaptive"
    feedback: str = "paper"
    initial: float = 1e-7
    minimum: float = 1e-7
    maximum: float = 1e-5
    warmup_updates: int = 100
    window: int = 10
    gain: float = 0.1
    target: float = 1e-5


class KLCoefficient:
    """The coefficient beta over the updates of a run.

    ``constant`` stays at the maximum. ``two_stage`` rises linearly over the warm-up and stays. ``adaptive`` rises
    likewise and then follows the mean m of the last KL values with ``e = (m - target) / target``:
    ``beta <- clip(beta (1 - gain e))``; the paper lowers beta where the KL is large, ``lagrangian`` raises it. One
    update changes beta by at most a factor of 2.
    """

    def __init__(self, settings: KLScheduleSettings):
        self.settings = settings
        self.num_updates = 0
        self.recent: deque[float] = deque(maxlen=settings.window)
        self.value = self._scheduled(settings.initial)

    def observe(self, kl: float) -> None:
        """Counts one update, given the KL averaged over its ranks, samples and steps."""
        self.num_updates += 1
        if math.isfinite(kl):
            self.recent.append(kl)
        follows = self.settings.schedule == "adaptive" and self.num_updates > self.settings.warmup_updates
        factor = self._feedback_factor() if follows and self.recent else 1.0
        self.value = self._scheduled(self.value * factor)

    def _scheduled(self, value: float) -> float:
        """The coefficient after so many updates: by the schedule, or ``value`` within the bounds where it is free."""
        settings, is_warm = self.settings, self.num_updates >= self.settings.warmup_updates
        if settings.schedule == "constant" or (settings.schedule == "two_stage" and is_warm):
            return settings.maximum
        if 0 < self.num_updates <= settings.warmup_updates:
            start = self._clip(settings.initial)
            return start + (settings.maximum - start) * self.num_updates / settings.warmup_updates
        return self._clip(value)

    def _feedback_factor(self) -> float:
        error = (sum(self.recent) / len(self.recent) - self.settings.target) / self.settings.target
        change = self.settings.gain * error
        factor = 1 - change if self.settings.feedback == "paper" else 1 + change
        return min(2.0, max(0.5, factor))

    def _clip(self, value: float) -> float:
        return min(self.settings.maximum, max(self.settings.minimum, value))

    def state_dict(self) -> dict:
        settings, recent = asdict(self.settings), list(self.recent)
        return {"value": self.value, "num_updates": self.num_updates, "recent": recent, "settings": settings}

    def load_state_dict(self, state: dict) -> None:
        """Goes on from a state; where it had other settings, by these from the next update on."""
        self.num_updates = state["num_updates"]
        self.recent = deque(state["recent"], maxlen=self.settings.window)
        self.value = self._scheduled(state["value"])
