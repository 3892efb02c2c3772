"""How a video is sampled: its size, noise levels, guidance and noise. One type for rollouts,
validation, generation and the teacher of a student; it alone builds a `Schedule`.

Imports torch only to build one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyvideo.data.prompts import Request
from hyvideo.models.guidance import Guidance, parse_interval
from hyvideo.schedulers.transitions import (
    Transition,
    describe_levels,
    levels_of_steps,
    ode_transition,
    refined_levels,
    sampler_of,
    schedule,
)

if TYPE_CHECKING:
    from hyvideo.schedulers.schedule import Schedule

ODE = "ode"  # sampler without noise


@dataclass(frozen=True)
class Sampling:
    """How a video is sampled."""

    frames: int
    height: int
    width: int
    fps: float
    steps: int
    shift: float
    sigmas: str | None = None  # noise level of each step; replaces ``shift``
    guidance_scale: float = 1.0
    low_noise_guidance_scale: float = 1.0  # of the low-noise expert
    boundary: float | None = None  # noise level from which the high-noise expert predicts
    guidance_interval: str = ""  # LOW:HIGH, the noise levels with guidance; empty: all
    negative_prompt: str = ""
    sampler: str = ODE  # or a name in `SAMPLERS`, or FILE.py:NAME
    eta: float = 0.0  # noise scale of the sampler
    last_step: str = "stochastic"
    reference_conventions: bool = False

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width."""
        return self.frames, self.height, self.width

    @property
    def guidance(self) -> Guidance:
        """Guidance by noise level. Raises ValueError for an invalid ``guidance_interval``."""
        return Guidance(
            self.guidance_scale,
            self.low_noise_guidance_scale,
            parse_interval(self.guidance_interval),
            self.boundary,
        )

    @property
    def is_guided(self) -> bool:
        return self.guidance.largest > 1

    @property
    def negative_requests(self) -> list[Request]:
        """Request of the negative branch of guidance; empty without guidance."""
        return [Request(self.negative_prompt, is_negative=True)] if self.is_guided else []

    @property
    def noise(self) -> str:
        """Sampler and noise scale, such as ``cps:1``; empty for the ODE."""
        return "" if self.sampler == ODE else f"{self.sampler}:{self.eta:g}"

    @property
    def levels(self) -> tuple[float, ...]:
        """Noise levels from 1 to 0. Raises ValueError for invalid ``sigmas``."""
        return levels_of_steps(self.steps, self.shift, self.sigmas)

    def describe(self) -> str:
        """Return the noise levels in words."""
        return describe_levels(self.steps, self.shift, self.sigmas)

    def divided(self, num_substeps: int) -> tuple[float, ...]:
        """Return the noise levels with each step divided into substeps, from 1 to 0."""
        return refined_levels(self.steps, self.shift, self.sigmas, num_substeps)

    def transitions(self) -> tuple[Transition, ...]:
        """Return the steps. Raises ValueError for a sampler that is not defined at one of them."""
        levels = self.levels
        if self.sampler == ODE:
            return tuple(ode_transition(*pair) for pair in zip(levels, levels[1:]))
        return schedule(self.sampler, levels, self.eta, self.last_step, self.reference_conventions)

    def stochastic_transitions(self) -> list[Transition]:
        """Return the steps with noise, regardless of an SDE window."""
        return [step for step in self.transitions() if step.is_stochastic]

    def branches(self, guidance: Guidance | None = None) -> list[int]:
        """Return the number of forward passes of each step, with another guidance if one is given."""
        guidance = guidance or self.guidance
        return [guidance.num_branches(level) for level in self.levels[:-1]]

    def schedule(self) -> "Schedule":
        """Return the schedule."""
        from hyvideo.schedulers.schedule import Schedule

        if self.sampler == ODE:
            return Schedule.at(self.levels)
        return Schedule(
            sampler=sampler_of(self.sampler, self.reference_conventions),
            sigmas=self.levels,
            transitions=self.transitions(),
            reference_conventions=self.reference_conventions,
        )
