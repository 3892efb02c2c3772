"""Watchdog: prints where a rank is that stays in one stage for too long.

It does not end the program; the time-out of the collectives does.
"""

import faulthandler
import socket
import sys
import threading

from hyvideo.distributed.mesh import Mesh

_STDERR = 2
_STACK_AFTER_S = 0.2  # after the stage, so that the two do not mix


class Watchdog:
    """Context manager that prints this rank's stage and Python stacks on stderr once a stage takes
    ``limit_s`` seconds; 0 disables it.

    ``unit`` names what the number of a stage counts.
    """

    def __init__(self, mesh: Mesh, limit_s: float, *, unit: str = "iteration"):
        self.mesh = mesh
        self.limit_s = limit_s
        self.unit = unit
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *_exception) -> None:
        self._disarm()

    def enter(self, stage: str, number: int = 0) -> None:
        """Start to watch a stage of an iteration, or of what ``unit`` names."""
        self._disarm()
        if self.limit_s:
            self._timer = threading.Timer(self.limit_s, self._print, [stage, number])
            self._timer.daemon = True
            self._timer.start()
            # in a thread without Python, because the main thread may hang with Python's lock
            faulthandler.dump_traceback_later(self.limit_s + _STACK_AFTER_S, file=_STDERR)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
            faulthandler.cancel_dump_traceback_later()

    def _print(self, stage: str, number: int) -> None:
        # one write, so that the lines of ranks do not mix
        sys.stderr.write(
            f"watchdog: rank {self.mesh.rank} ({socket.gethostname()}) has been in stage {stage} "
            f"of {self.unit} {number} for {self.limit_s:g} s; stacks:\n"
        )
