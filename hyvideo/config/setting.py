"""One setting: its default, its sentence, and what else is to be known of it, in one place.

    batch_size: int = layout(2, "Rollouts of a data-parallel replica in one batch.", at_least=1)

The function says what the setting decides:

    learning    samples, rewards or updates: with another value it is another experiment
    layout      how the rollouts of an iteration are dealt; free as long as there are as many of them
    machine     how and how far a run computes, or when it gives up, and not what it learns
    records     what is kept of a run, and where
    start       how this start goes, and nothing after it
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

Decides = Literal["learning", "layout", "machine", "records", "start"]
Switch = Literal["auto", "true", "false"]  # a truth value, or what the machine makes of it

TRUTHS = dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "f", "n"), False
)


class Unused(NamedTuple):
    """A condition under which settings do nothing, and its words, which may name settings: ``kl_schedule {x}``."""

    reason: str
    holds: Callable[[Any, int], bool]  # of the run's settings (`Config`) and the number of processes


@dataclass(frozen=True)
class Traits:
    """Facts of a setting beside name, type and default. A number is not negative but where it says so."""

    sentence: str
    decides: Decides
    at_least: float | None = 0.0
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    measured: bool = False  # an evaluation of a policy depends on its value, and not on what a path leads to alone
    choices: Collection[str] = ()  # built-in names of a setting that may also be FILE.py:NAME
    unused: tuple[Unused, ...] = ()  # the first that holds is the reason why the setting does nothing

    def range_problem(self, value: object) -> str | None:
        """The reason why the setting cannot have a number, None where it can and for what is no number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}" if self.above else "must be positive"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}" if self.at_least else "must not be negative"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None


def setting(decides: Decides, default: Any, sentence: str, *unused: Unused, **traits) -> Any:
    """A dataclass field with its traits; ``traits`` and ``unused`` as in `Traits`."""
    metadata = {"traits": Traits(sentence, decides, unused=unused, **traits)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


learning, layout, machine, records, start = (
    partial(setting, decides) for decides in ("learning", "layout", "machine", "records", "start")
)
