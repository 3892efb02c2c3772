"""Declaration of a setting: its default, help text and traits in one place.

    batch_size: int = layout(2, "Rollouts per batch and data-parallel replica.", at_least=1)

The function names what the setting affects:

    learning    samples, rewards or updates: another value is another experiment
    layout      how an iteration's rollouts are distributed; may change while their number stays the same
    machine     how and how long a run computes, or when it stops with an error, but not what it learns
    records     which outputs of a run are kept, and where
    start       this start of the program only
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Decides = Literal["learning", "layout", "machine", "records", "start"]
Switch = Literal["auto", "true", "false"]  # auto: chosen by the device

TRUTHS = dict.fromkeys(("true", "yes", "on", "1", "t", "y"), True) | dict.fromkeys(
    ("false", "no", "off", "0", "f", "n"), False
)


@dataclass(frozen=True)
class Traits:
    """Properties of a setting besides name, type and default.

    Numbers must not be negative unless stated otherwise.
    """

    sentence: str
    decides: Decides
    at_least: float | None = 0.0
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    is_path: bool = False  # files or folders, relative to the working directory at the start
    measured: bool = False  # the value affects an evaluation of a policy; false for paths
    choices: Collection[str] = ()  # built-in names of a setting that may also be FILE.py:NAME

    def range_problem(self, value: object) -> str | None:
        """Return why a number is out of range; None if it is in range or not a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}" if self.above else "must be positive"
        if self.at_least is not None and value < self.at_least:
            return (
                f"must be at least {self.at_least:g}" if self.at_least else "must not be negative"
            )
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None


def setting(decides: Decides, default: Any, sentence: str, **traits) -> Any:
    """Return a dataclass field with ``traits``, which are fields of `Traits`."""
    metadata = {"traits": Traits(sentence, decides, **traits)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


learning, layout, machine, records, start = (
    partial(setting, decides) for decides in ("learning", "layout", "machine", "records", "start")
)
