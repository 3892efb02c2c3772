"""Watchdog: reports each rank's stage, and the time spent in it, when a program hangs; it does not
stop the program.

A thread of each rank writes a heartbeat (stage, iteration, seconds) to the store at torchrun's
address, and the main rank's thread reads them all. Process groups are not used, because they hang
together with the training. All times are on monotonic clocks. A rank over the limit prints its
Python stack even if the store does not answer.
"""

import faulthandler
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from hyvideo.data.text import align_columns
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.rank_agreement import name_ranks, open_store

# A report is at most two heartbeats late, a tenth of the limit; ``config.rules`` keeps it within
# collective_timeout.
LONGEST_BEAT_S = 5.0
BEATS_PER_LIMIT = 20
_CONNECT_S = 10.0
_STOP_S = 2.0
_STDERR = 2
_ENDED = "ended"  # stage of a rank that has finished while others still work


class Heartbeat(NamedTuple):
    """State of a rank, which is assumed to be still in the stage of its last heartbeat."""

    host: str
    stage: str
    iteration: int
    seconds: float  # in this stage
    age: float = 0.0  # seconds since the heartbeat arrived

    def after(self, age: float) -> "Heartbeat":
        return self._replace(seconds=self.seconds + age, age=age)


class Watchdog:
    """Context manager that reports ranks in one stage for more than ``limit_s`` seconds on stderr;
    0 disables it.

    ``unit`` names what the number of a stage counts. A rank that has left the context without an
    exception is not reported.
    """

    def __init__(self, mesh: Mesh, limit_s: float, *, unit: str = "iteration"):
        self.mesh = mesh
        self.limit_s = limit_s
        self.unit = unit
        self.beat_s = min(LONGEST_BEAT_S, limit_s / BEATS_PER_LIMIT)
        self._entry = "start", 0, time.monotonic()  # stage, iteration and the time it was entered
        self._stopped = threading.Event()
        self._has_ended = False
        # A daemon thread, because waiting for an unreachable host must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.limit_s:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception) -> None:
        self._has_ended = kind is None
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def enter(self, stage: str, iteration: int = 0) -> None:
        """Record that this rank has entered a stage of an iteration, or of what ``unit`` names."""
        self._entry = stage, iteration, time.monotonic()

    def _run(self) -> None:
        start = time.monotonic()
        # with its arrival
        last = {rank: (Heartbeat("?", "?", 0, 0.0), start) for rank in range(self.mesh.world_size)}
        try:
            store = dist.PrefixStore("watchdog", open_store(self.mesh, timeout_s=_CONNECT_S))
        # KeyError: there is no MASTER_ADDR, which independent processes do not need
        except (dist.DistError, KeyError):
            store, last = None, {}
        with_stack, reported = None, 0
        while not self._stopped.wait(self.beat_s):
            entry = self._entry
            stage, iteration, since = entry
            own = Heartbeat(socket.gethostname(), stage, iteration, time.monotonic() - since)
            if own.seconds >= self.limit_s and entry is not with_stack:  # once per stage entry
                with_stack = entry
                self._print_stack(own)
            try:
                if store is not None:
                    store.set(str(self.mesh.rank), json.dumps(own))
                    self._read(store, last)
            # what served the store has exited, so other ranks' heartbeats would get too old
            except dist.DistError:
                store, last = None, {}
            if self.mesh.is_main:
                last[self.mesh.rank] = own, time.monotonic()
                states = {
                    rank: beat.after(time.monotonic() - arrival)
                    for rank, (beat, arrival) in last.items()
                    if beat.stage != _ENDED
                }
                before, reported = (
                    reported,
                    num_reports(max(beat.seconds for beat in states.values()), self.limit_s),
                )
                if reported > before:
                    report = describe(
                        states, self.limit_s, silent_after=max(4 * self.beat_s, 2.0), unit=self.unit
                    )
                    sys.stderr.write(f"{report}\n")  # one write: one block
        if store is not None and self._has_ended:
            with suppress(dist.DistError):
                store.set(
                    str(self.mesh.rank), json.dumps(Heartbeat(socket.gethostname(), _ENDED, 0, 0.0))
                )

    def _read(self, store: dist.Store, last: dict[int, tuple[Heartbeat, float]]) -> None:
        """Update the main rank's table with new heartbeats; the seconds of two heartbeats always
        differ.
        """
        if not self.mesh.is_main:
            return
        for rank in last:
            if store.check([str(rank)]):  # reading a missing one would wait
                heartbeat = Heartbeat(*json.loads(store.get(str(rank))))
                if heartbeat != last[rank][0]:
                    last[rank] = heartbeat, time.monotonic()

    def _print_stack(self, own: Heartbeat) -> None:
        sys.stderr.write(
            f"watchdog: rank {self.mesh.rank} ({own.host}) has been in stage {own.stage} of "
            f"{self.unit} {own.iteration} for {own.seconds:.0f} s; Python stack:\n"
        )
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)


def num_reports(seconds: float, limit_s: float) -> int:
    """Return the number of reports after ``seconds`` in a stage: at the limit, and whenever the
    time has doubled.
    """
    return math.floor(math.log2(seconds / limit_s)) + 1 if seconds >= limit_s else 0


def describe(
    states: Mapping[int, Heartbeat], limit_s: float, *, silent_after: float, unit: str = "iteration"
) -> str:
    """Return the report: every rank's stage and time in it, and the ranks without a heartbeat for
    ``silent_after``.
    """
    rows = [("rank", "host", "stage", unit, "seconds", "last heartbeat")]
    for rank, state in states.items():
        times = f"{state.seconds:.0f}", f"{state.age:.0f} s ago"
        rows.append((str(rank), state.host, state.stage, str(state.iteration), *times))
    over = name_ranks(rank for rank, state in states.items() if state.seconds >= limit_s)
    silent = name_ranks(rank for rank, state in states.items() if state.age > silent_after)
    return "\n".join(
        [
            f"watchdog: {over} in one stage for more than {limit_s:g} s",
            *align_columns(rows),
            f"no heartbeat (stopped, exited or unreachable): {silent}"
            if silent
            else "all of these ranks respond",
        ]
    )
