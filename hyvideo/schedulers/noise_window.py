"""Mixed ODE/SDE sampling: noise, and so training, on some steps of the schedule; the ODE elsewhere.

    fixed:2:4      the 4 stochastic steps from the third on, always
    random:4       4 neighbouring ones, drawn anew each iteration
    sliding:4:2    4 neighbouring ones, 2 further on each iteration, round and round

A window counts the steps that are stochastic without it, so that each has as many to train. All rollouts of an
iteration share one: they are compared with each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Neighbouring stochastic steps that have noise."""

    kind: str  # fixed, random or sliding
    length: int
    start: int = 0  # of a fixed one
    stride: int = 1  # of a sliding one

    def starts(self, num_stochastic: int) -> range:
        """Places among the stochastic steps where the window begins, each as often as the others."""
        if self.kind == "fixed":
            return range(self.start, self.start + 1)
        num_starts = num_stochastic - self.length + 1
        return range(0, num_starts, math.gcd(self.stride, num_starts))  # all, of a random one

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums of numbers of the stochastic steps over the window, at each of its places."""
        return [sum(values[start : start + self.length]) for start in self.starts(len(values))]

    def steps(self, stochastic: list[int], iteration: int, draw: Callable[[int], int]) -> list[int]:
        """Steps that have noise in an iteration, counted from 1, of the stochastic ones.

        ``draw`` gives a number below its argument, drawn for this iteration: the start of a random window.
        """
        num_starts = len(stochastic) - self.length + 1
        if self.kind == "sliding":
            first = (iteration - 1) * self.stride % num_starts
        else:
            first = draw(num_starts) if self.kind == "random" else self.start
        return stochastic[first : first + self.length]


def parse_window(text: str, num_stochastic: int) -> Window | None:
    """Window of a setting; None for an empty one. Raises ValueError for what does not fit the stochastic steps."""
    if not text:
        return None
    kind, *numbers = text.split(":")
    forms = {"fixed": (2, 2), "random": (1, 1), "sliding": (1, 2)}
    least, most = forms.get(kind, (1, 0))
    if not least <= len(numbers) <= most or not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise ValueError(
            f"sde_window must be fixed:START:LENGTH, random:LENGTH or sliding:LENGTH[:STRIDE], got {text!r}"
        )
    first, second = [*map(int, numbers), 1][:2]
    window = Window(kind, second, start=first) if kind == "fixed" else Window(kind, first, stride=second)
    if window.length < 1 or window.stride < 1 or window.start + window.length > num_stochastic:
        raise ValueError(
            f"sde_window must lie within the {num_stochastic} stochastic steps of the schedule and have at least one, "
            f"got {text!r}"
        )
    return window
