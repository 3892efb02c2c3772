"""Handling of stop signals: the run saves a checkpoint and exits.

    SIGUSR1 (Slurm before the time limit, our launchers), Ctrl-C    save and exit with code 75; restart to resume
    SIGHUP (the terminal or the ssh connection was closed)          the same, unless ignored because of nohup
    SIGTERM                                                         the same; under torchrun, exit at once
    Ctrl-C twice                                                    exit at once

The ranks check for signals with a CPU collective before each step of a sampler and each pass of an
update, so that all stop at the same one. After the first optimizer step of an iteration they do not
check until its end, because the state before the iteration is gone. Under torchrun, SIGTERM may
also mean that another rank has failed; saving would wait for that rank.
"""

import os
import signal

from hyvideo.distributed.collectives import any_rank
from hyvideo.distributed.mesh import Mesh
from hyvideo.settings.processes import stop_signals, write_to_stderr


class Stopped(RuntimeError):
    """Raised when a signal stops the run. The state of the last finished iteration can be saved."""


class PreemptionSignals:
    """Context manager that handles stop signals."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.received: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "PreemptionSignals":
        for number in stop_signals():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Stopped on all ranks if any of them received a signal. All ranks must call this."""
        if any_rank(self.received is not None, self.mesh):
            source = self.received or "a signal to another rank"
            raise Stopped(f"stopped by {source}; the same command resumes the run")

    def all_ready(self, is_ready: bool) -> bool:
        """Return whether every rank is ready. All ranks must call this repeatedly until then.

        Raises like `check`.
        """
        self.check()
        return not any_rank(not is_ready, self.mesh)

    def _handle(self, number: int, _frame) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            os._exit(130)
        if self.received is None and self.mesh.is_main:
            write_to_stderr(
                "\nstopping: the run saves a checkpoint after this pass; press Ctrl-C twice to "
                "exit at once\n"
            )
        self.received = signal.Signals(number).name
