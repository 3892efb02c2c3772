"""Trust region: KL to an anchor (position), KL to the rollout policy (velocity), and the
coefficient of both.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # settings are checked before torch is imported
    from torch import Tensor


def position_kl(mean: "Tensor", anchor_mean: "Tensor", std: "Tensor") -> "Tensor":
    """Return the KL of two Gaussians of equal variance, the mean of
    ``(mean - anchor)^2 / (2 std^2 + 1e-6)``.

    Shapes: both means (batch, ...); std (batch, 1, ..., 1); result (batch,).
    """
    return ((mean - anchor_mean) ** 2 / (2 * std**2 + 1e-6)).flatten(1).mean(1)


def reference_kl_weight(std: float, width: float) -> float:
    """Return the public reference's position KL, with denominator ``2 (std^2 / width + 1e-6)``,
    over `position_kl`.
    """
    return (2 * std**2 + 1e-6) / (2 * (std**2 / width + 1e-6))


def velocity_kl(log_prob: "Tensor", old_log_prob: "Tensor") -> "Tensor":
    """Return ``old_log_prob - log_prob``, an unbiased estimate of the KL to the rollout policy.

    Shape: (batch,).

    With one update per iteration it is 0 and its gradient is zero on average. The closed form,
    which is exact at every step, is ``position_kl(mean, rollout_mean, std)``. With cps, the
    estimate is ``2 std^2`` times the KL (docs/sde.md).
    """
    return old_log_prob - log_prob


class KLWeights(NamedTuple):
    """Weights of the two KL terms in the loss: ``position * KL_pos + velocity * KL_vel``."""

    position: float
    velocity: float


@dataclass(frozen=True)
class KLScheduleSettings:
    """Schedule of the KL coefficient beta, which starts at the minimum and stays in
    [minimum, maximum].
    """

    schedule: str = "adaptive"
    minimum: float = 1e-7
    maximum: float = 1e-5
    warmup_updates: float = 100
    window: int = 10
    gain: float = 0.1
    target: float = 1e-5


class KLCoefficient:
    """KL coefficient beta over the updates of a run.

    ``constant``: the maximum. ``two_stage``: a linear warm-up to the maximum. ``adaptive``: the
    same warm-up, then ``beta <- clip(beta (1 - gain e), minimum, maximum)`` with
    ``e = (m - target) / target`` and m the mean of the last ``window`` KL values: as in the paper, a
    KL above the target lowers beta. One update changes beta by at most a factor of 2.
    """

    def __init__(self, settings: KLScheduleSettings):
        self.settings = settings
        self.num_updates = 0
        self.recent: deque[float] = deque(maxlen=settings.window)
        self.value = self._scheduled(settings.minimum)

    def observe(self, kl: float) -> None:
        """Record one update and its KL, averaged over ranks, samples and steps."""
        self.num_updates += 1
        if math.isfinite(kl):
            self.recent.append(kl)
        value = self.value
        if self.settings.schedule == "adaptive" and self.recent:
            value *= self._feedback_factor()
        self.value = self._scheduled(value)  # the warm-up sets its own values

    def _scheduled(self, value: float) -> float:
        """Return the scheduled coefficient, or ``value`` within the bounds if the schedule does not
        determine it.
        """
        settings = self.settings
        is_warm = self.num_updates >= self.settings.warmup_updates
        if settings.schedule == "constant" or (settings.schedule == "two_stage" and is_warm):
            return settings.maximum
        if 0 < self.num_updates < settings.warmup_updates + 1:
            passed = min(self.num_updates, settings.warmup_updates)
            rise = settings.maximum - settings.minimum
            return settings.minimum + rise * passed / settings.warmup_updates
        return min(settings.maximum, max(settings.minimum, value))

    def _feedback_factor(self) -> float:
        error = (sum(self.recent) / len(self.recent) - self.settings.target) / self.settings.target
        return min(2.0, max(0.5, 1 - self.settings.gain * error))

    def state_dict(self) -> dict:
        return {"value": self.value, "num_updates": self.num_updates, "recent": list(self.recent)}

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved state. The current settings apply, also if the run had others."""
        self.num_updates = state["num_updates"]
        self.recent = deque(state["recent"], maxlen=self.settings.window)
        self.value = self._scheduled(state["value"])
