"""Where a run is: its iteration and stage, the times of the stages, and whether it must stop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from hyvideo.records.stage_timer import StageTimer
from hyvideo.training.preemption import PreemptionSignals


class Progress:
    """Current iteration and stage: calls ``on_stage(stage, iteration)`` and
    ``show(stage, iteration, part)``.
    """

    def __init__(
        self,
        signals: PreemptionSignals,
        on_stage: Callable[[str, int], None] = lambda stage, iteration: None,
        show: Callable[[str, int, str], None] = lambda stage, iteration, part: None,
    ):
        self.signals = signals
        self.timer: StageTimer | None = None  # of the current iteration
        self.iteration = 0  # the last finished one between iterations
        self.stage = ""
        self._part = ""
        self._on_stage = on_stage
        self._show = show

    def enter(self, stage: str, part: str = "") -> None:
        """Report that the run enters a stage of the current iteration, or a ``part`` of it."""
        self.stage = stage
        self._part = part
        self._on_stage(stage, self.iteration)
        self._show(stage, self.iteration, part)

    def timed(self, stage: str, part: str = "") -> AbstractContextManager[None]:
        """Context manager of a stage whose time is measured."""
        return self.timer(stage, part)

    def check(self) -> None:
        """Raise Stopped on all ranks if one of them received a signal. Collective."""
        self.signals.check()

    def begin_pass(self, stage: str, part: str) -> None:
        """Report a forward pass, unless the run must stop. Collective; raises Stopped."""
        self.enter(stage, part)
        self.check()

    def steps(self, schedule: Sequence[int]) -> Iterator[int]:
        """Yield the steps of a sampler and report each as a part of the stage. Collective; raises
        Stopped.
        """
        for number, step in enumerate(schedule, 1):
            self.check()
            self._on_stage(self.stage, self.iteration)
            self._show(self.stage, self.iteration, f"{self._part}, step {number}/{len(schedule)}")
            yield step
