"""SDE window: the steps that add noise and are trained; the other steps use the ODE.

    fixed:2:4      4 stochastic steps, starting at the third
    random:4       4 consecutive stochastic steps, drawn in each iteration
    sliding:4:2    4 consecutive stochastic steps, shifted by 2 in each iteration, cyclically

Positions count only the steps that are stochastic without a window, so that every position trains
equally many steps. All rollouts of an iteration share the window, because they are compared with
each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """An SDE window: consecutive stochastic steps."""

    kind: str  # fixed, random or sliding
    length: int
    start: int = 0  # for fixed
    stride: int = 1  # for sliding

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the window at each of its positions, given one value per stochastic
        step.
        """
        return [sum(position) for position in self.positions(values)]

    def positions(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Return the values in the window at each of its positions, given one value per stochastic
        step.
        """
        num_starts = len(values) - self.length + 1
        # All are equally frequent. A random window has stride 1, and thus all positions.
        starts: Sequence[int] = range(0, num_starts, math.gcd(self.stride, num_starts))
        if self.kind == "fixed":
            starts = [self.start]
        return [values[start : start + self.length] for start in starts]

    def steps(self, stochastic: list[int], iteration: int, draw: Callable[[int], int]) -> list[int]:
        """Return the stochastic steps in the window of an iteration, counted from 1.

        ``draw(n)`` returns a random integer in [0, n) for this iteration, the start of a random
        window.
        """
        num_starts = len(stochastic) - self.length + 1
        if self.kind == "sliding":
            first = (iteration - 1) * self.stride % num_starts
        elif self.kind == "random":
            first = draw(num_starts)
        else:
            first = self.start
        return stochastic[first : first + self.length]


def parse_window(text: str, num_stochastic: int) -> Window | None:
    """Return the window of a setting; None if empty.

    Raises ValueError if it does not fit the stochastic steps.
    """
    if not text:
        return None
    kind, *numbers = text.split(":")
    forms = {"fixed": (2, 2), "random": (1, 1), "sliding": (1, 2)}
    least, most = forms.get(kind, (1, 0))
    if not least <= len(numbers) <= most or not all(
        number.isdecimal() and len(number) < 10 for number in numbers
    ):
        raise ValueError(
            "sde_window must be fixed:START:LENGTH, random:LENGTH or sliding:LENGTH[:STRIDE], got "
            f"{text!r}"
        )
    first, second = [*map(int, numbers), 1][:2]
    if kind == "fixed":
        window = Window(kind, second, start=first)
    else:
        window = Window(kind, first, stride=second)
    if window.start + window.length > num_stochastic:
        raise ValueError(
            f"sde_window must fit the {num_stochastic} stochastic steps of the schedule, because "
            f"the other steps have no noise and cannot be trained, got {text!r}, which ends at "
            f"step {window.start + window.length} of them; lower START or LENGTH"
        )
    return window
