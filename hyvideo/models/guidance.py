"""Which model and which guidance a noise level has.

A model of two experts, such as Wan2.2 A14B, has one transformer for noise levels from ``boundary``
up and another below it, each with a guidance scale of its own. Imports no torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

Expert = Literal["high", "low"]
OTHER_EXPERT: dict[Expert, Expert] = {"high": "low", "low": "high"}
_ROUNDING = 1e-6  # of noise levels in float32


def expert_at(level: float, boundary: float) -> Expert:
    """Return the expert of a noise level: the high-noise one from the boundary, inclusive."""
    return "high" if level >= boundary - _ROUNDING else "low"


def levels_of(expert: Expert | None, boundary: float | None) -> tuple[float, float]:
    """Return the lowest and highest noise level of an expert, or of a single transformer (None)."""
    if expert is None or boundary is None:
        return 0.0, 1.0
    return (boundary, 1.0) if expert == "high" else (0.0, boundary - 10 * _ROUNDING)


@dataclass(frozen=True)
class Guidance:
    """Guidance by noise level."""

    scale: float = 1.0  # 1 or less: none
    low_noise_scale: float = 1.0  # below ``boundary``
    interval: tuple[float, float] = (0.0, 1.0)  # noise levels with guidance
    boundary: float | None = None  # of the experts; None: a single transformer

    @property
    def largest(self) -> float:
        """Largest scale of any noise level."""
        return self.scale if self.boundary is None else max(self.scale, self.low_noise_scale)

    def scale_of(self, expert: Expert | None) -> float:
        """Return the scale of an expert, or of a single transformer (None)."""
        return self.low_noise_scale if expert == "low" else self.scale

    def scale_at(self, level: float) -> float:
        """Return the scale at a noise level, 1 outside the interval."""
        low, high = self.interval
        if not low - _ROUNDING <= level <= high + _ROUNDING:
            return 1.0
        return self.scale_of(None if self.boundary is None else expert_at(level, self.boundary))

    def num_branches(self, level: float) -> int:
        """Return the forward passes of a velocity at a noise level: 2 with guidance."""
        return 2 if self.scale_at(level) > 1 else 1

    def with_scale(self, expert: Expert | None, scale: float) -> "Guidance":
        """Return a copy with another scale of an expert, or of a single transformer (None)."""
        return (
            replace(self, low_noise_scale=scale) if expert == "low" else replace(self, scale=scale)
        )


def parse_interval(text: str) -> tuple[float, float]:
    """Return the lowest and highest noise level of a guidance interval. Raises ValueError for
    invalid text.
    """
    try:
        low, high = map(float, (text or "0:1").split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low < high <= 1:
        raise ValueError(
            f"guidance_interval must be LOW:HIGH with 0 <= LOW < HIGH <= 1, got {text!r}"
        )
    return low, high
