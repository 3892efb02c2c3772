"""The stop flag of a run: after a signal, it saves the last finished iteration and exits with 75.

    SIGTERM, Ctrl-C
    SIGUSR1     also from Slurm before its time limit, and when the launcher of a rank dies
    SIGHUP      the terminal or the ssh connection was closed; ignored with nohup

Before each step of a sampler and each pass of an update, the ranks compare their flags with a CPU
collective, so that all stop at the same one. After the first optimizer step of an iteration they
read the flag only at its end, because the state before the iteration is gone.

torchrun also sends SIGTERM to the ranks of a node after another one has failed. The next comparison
then fails, so that nothing is saved.
"""

import os
import signal

from hyvideo.distributed.collectives import any_rank
from hyvideo.distributed.mesh import Mesh
from hyvideo.settings.processes import is_launched, stop_signals, write_to_stderr


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
        if self.received is None:
            keys = "Ctrl-\\"  # a rank receives Ctrl-C twice, from the terminal and its launcher
            if not is_launched():
                keys = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C"
                signal.signal(signal.SIGINT, _exit_handler())
            if self.mesh.is_main:
                write_to_stderr(
                    "\nstopping: the run saves its last finished iteration after this pass; press "
                    f"{keys} to exit at once\n"
                )
        self.received = signal.Signals(number).name


def _exit_handler():
    """Return a handler of Ctrl-C that exits at once: the kernel's, which does not wait for the end of
    an operator. The first process of a container has none.
    """
    if os.getpid() > 1:
        return signal.SIG_DFL

    def exit_at_once(_number: int, _frame) -> None:
        os._exit(128 + signal.SIGINT)

    return exit_at_once
