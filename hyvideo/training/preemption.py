"""Signals: a run that is asked to leave saves what it has and leaves; one that is asked twice leaves at once.

    SIGUSR1 (Slurm before the time is up, our launchers), Ctrl-C    leave with code 75, to be started again
    SIGTERM                                                         the same; under torchrun the end, at once
    Ctrl-C twice                                                    leave now

A signal reaches one rank or all, at any moment. Ranks agree on it between passes of the transformer, by a message
between CPUs, so that all leave at the same one. From a round's first optimizer step to its end they do not ask: the
state of the iteration before is gone by then. torchrun sends SIGTERM where another rank has failed: who then went on
would wait for it.
"""

import os
import signal

from hyvideo.distributed.collectives import anywhere
from hyvideo.distributed.mesh import Mesh

EXIT_CODE = 75  # EX_TEMPFAIL: the same command goes on


class Stopped(RuntimeError):
    """The run was asked to leave, and is as it was after its last finished iteration."""


class PreemptionSignals:
    """Listens for signals while it is entered."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.received: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "PreemptionSignals":
        ends_at_once = {signal.SIGTERM} if "TORCHELASTIC_RUN_ID" in os.environ else set()
        for number in {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT} - ends_at_once:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Stopped on all ranks if any was asked to leave. All ranks must call."""
        if anywhere(self.received is not None, self.mesh):
            who = self.received or "a signal to another rank"
            raise Stopped(f"stop requested by {who}; go on by --resume_from_checkpoint latest")

    def all_ready(self, is_ready: bool) -> bool:
        """Claims that every rank is ready. All ranks must ask, again and again until they are; raises as `check`."""
        self.check()
        return not anywhere(not is_ready, self.mesh)

    def _take(self, number: int, _frame) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            os._exit(130)
        if self.received is None and self.mesh.is_main:
            os.write(2, b"\nstop requested: the run saves and ends after this pass; Ctrl-C twice ends it at once\n")
        self.received = signal.Signals(number).name
