"""A search over schedules for steps that a sampler should not have: not finite, without noise, or with too much.

They are at the boundaries: the pole of sage and flow at sigma = 1, and sigma' = 0, where cps has nothing to draw.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hyvideo.schedulers.transitions import SDE_TYPES, Transition, schedule, shifted_levels

SEARCH_STEPS = range(4, 201)
SEARCH_SHIFTS = (1.0, 3.0, 5.0, 7.0, 9.0)
SEARCH_ETAS = (0.1, 0.25, 0.5, 0.7, 0.9, 1.2)  # from well below to well above what published recipes set


@dataclass(frozen=True)
class BadStep:
    """A step that is not what one would expect of a sampler, and where it is."""

    kind: str  # `not finite`, `deterministic`: std 0, or `exploding`: std above 1, more than the noise there ever is
    sde_type: str
    shift: float
    eta: float
    num_steps: int
    place: int

    @property
    def name(self) -> str:
        return "last" if self.place == self.num_steps - 1 else f"step {self.place + 1}"


def search(
    steps: Iterable[int] = SEARCH_STEPS,
    shifts: Iterable[float] = SEARCH_SHIFTS,
    etas: Iterable[float] = SEARCH_ETAS,
    sde_types: Iterable[str] = SDE_TYPES,
) -> Iterator[BadStep]:
    """Every bad step of every schedule in the grid. An eta above 1 is left out for cps, which refuses it."""
    for sde_type, shift, num_steps, eta in itertools.product(sde_types, shifts, steps, etas):
        if sde_type == "cps" and eta > 1:
            continue
        for place, step in enumerate(schedule(sde_type, shifted_levels(num_steps, shift), eta, "stochastic")):
            if kind := _kind(step):
                yield BadStep(kind, sde_type, shift, eta, num_steps, place)


def _kind(step: Transition) -> str | None:
    if not (math.isfinite(step.a) and math.isfinite(step.b) and math.isfinite(step.std)):
        return "not finite"
    if step.std == 0:
        return "deterministic"
    return "exploding" if step.std > 1 else None


def summary_rows(found: Iterable[BadStep]) -> list[list[str]]:
    """For each SDE and shift, what is bad of each kind, with the fewest and the most denoising steps: `step 1: 68-200`.

    Columns: SDE, shift, not finite, deterministic, exploding.
    """
    by_row: dict[tuple, dict[str, list[int]]] = {}
    for bad in found:
        what = f"eta {bad.eta:g}" if bad.kind == "exploding" else bad.name
        by_row.setdefault((bad.sde_type, bad.shift, bad.kind), {}).setdefault(what, []).append(bad.num_steps)
    rows = []
    for sde_type, shift in itertools.product(SDE_TYPES, SEARCH_SHIFTS):
        cells = [by_row.get((sde_type, shift, kind), {}) for kind in ("not finite", "deterministic", "exploding")]
        ranges = ["; ".join(f"{what}: {min(n)}-{max(n)}" for what, n in cell.items()) or "none" for cell in cells]
        rows.append([sde_type, f"{shift:g}", *ranges])
    return rows
