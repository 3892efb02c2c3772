"""Watchdog: reports each rank's stage, and the time spent in it, when a run hangs; it does not stop the run.

A thread of each rank writes a heartbeat (stage, iteration, seconds) to the store at torchrun's address, and the main
rank's thread reads them all. Process groups are not used, because they hang together with the training. All times are
on monotonic clocks. A rank over the limit prints its Python stack even if the store does not answer.
"""

import faulthandler
import json
import math
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from hyvideo.data.outside import align_columns
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.rank_agreement import name_ranks, open_store

# A report is at most two heartbeats late, a tenth of the limit; ``config.rules`` keeps it within collective_timeout.
LONGEST_BEAT_S = 5.0
BEATS_PER_LIMIT = 20
ENDED = "ended"
_CONNECT_S = 10.0
_STOP_S = 2.0
_STDERR = 2


@dataclass(frozen=True)
class StageEntry:
    """Stage of a rank and the time it was entered."""

    stage: str
    iteration: int
    since: float  # time.monotonic()


@dataclass(frozen=True)
class Heartbeat:
    """State reported by a rank. The main rank assumes that a rank without heartbeats is still in its last stage."""

    host: str
    stage: str
    iteration: int
    seconds: float  # in this stage
    since: str  # wall time, only displayed
    silent_s: float = 0.0  # since the last heartbeat arrived; 0 if it is recent


class Watchdog:
    """Context manager that reports ranks in one stage for more than ``limit_s`` seconds on stderr; 0 disables it."""

    def __init__(self, mesh: Mesh, limit_s: float):
        self.mesh, self.limit_s = mesh, limit_s
        self.beat_s = min(LONGEST_BEAT_S, limit_s / BEATS_PER_LIMIT)
        self._entry = StageEntry("start", 0, time.monotonic())
        self._reported: StageEntry | None = None
        self._stopped = threading.Event()
        # A daemon thread, because waiting for an unreachable host must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def enter(self, stage: str, iteration: int = 0) -> None:
        """Record that this rank has entered a stage."""
        self._entry = StageEntry(stage, iteration, time.monotonic())

    def _run(self) -> None:
        table, reported = HeartbeatTable(self.mesh, silent_after=max(4 * self.beat_s, 2.0)), 0
        try:
            store = dist.PrefixStore("watchdog", open_store(self.mesh, timeout_s=_CONNECT_S))
        except dist.DistError:
            store = None
        is_last, pause = False, 0.0  # send the first heartbeat at once
        while not is_last:
            is_last = self._stopped.wait(pause)
            pause = self.beat_s
            entry = StageEntry(ENDED, self._entry.iteration, time.monotonic()) if is_last else self._entry
            heartbeat = self._heartbeat(entry)
            self._print_stack(entry, heartbeat)
            try:
                if store is not None:
                    store.set(str(self.mesh.rank), json.dumps(asdict(heartbeat)))
                    if self.mesh.is_main:
                        table.read(store)
            except dist.DistError:  # the rank or node that served the store has exited
                store = None
            if self.mesh.is_main and not is_last:
                table.update(self.mesh.rank, heartbeat, time.monotonic())
                # Without a store, the heartbeats of other ranks are out of date.
                current = [heartbeat] if store is None else table.current(time.monotonic())
                before, reported = reported, num_reports(max(beat.seconds for beat in current), self.limit_s)
                if reported > before:
                    note = "; the store does not answer, so other ranks are unknown" if store is None else ""
                    sys.stderr.write(f"{describe(current, self.limit_s)}{note}\n")  # one write: one block

    def _heartbeat(self, entry: StageEntry) -> Heartbeat:
        seconds = time.monotonic() - entry.since
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return Heartbeat(socket.gethostname(), entry.stage, entry.iteration, seconds, since)

    def _print_stack(self, entry: StageEntry, heartbeat: Heartbeat) -> None:
        """Print this rank's stack if it is over the limit, once per stage entry."""
        if heartbeat.seconds < self.limit_s or entry is self._reported:
            return
        self._reported = entry
        sys.stderr.write(
            f"watchdog: rank {self.mesh.rank} ({heartbeat.host}) has been in stage {heartbeat.stage} of iteration "
            f"{heartbeat.iteration} for {heartbeat.seconds:.0f} s; Python stack:\n"
        )
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)


class HeartbeatTable:
    """Last heartbeat of every rank and its arrival time, by the main rank's clock."""

    def __init__(self, mesh: Mesh, *, silent_after: float):
        self.silent_after, self._rank = silent_after, mesh.rank
        start = time.monotonic()
        self._last = dict.fromkeys(range(mesh.world_size), (Heartbeat("?", "?", 0, 0.0, "?"), start))

    def read(self, store: dist.Store) -> None:
        """Read the existing heartbeats of other ranks; reading a missing one would wait."""
        for rank in self._last:
            if rank != self._rank and store.check([str(rank)]):
                self.update(rank, Heartbeat(**json.loads(store.get(str(rank)))), time.monotonic())

    def update(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat if it is new; the seconds of two heartbeats always differ."""
        if self._last[rank][0] != heartbeat:
            self._last[rank] = (heartbeat, now)

    def current(self, now: float) -> list[Heartbeat]:
        """Return the state of every rank, in rank order."""
        states = []
        for heartbeat, arrival in self._last.values():
            is_silent = now - arrival > self.silent_after and heartbeat.stage != ENDED
            silent_s = now - arrival if is_silent else 0.0
            states.append(replace(heartbeat, seconds=heartbeat.seconds + silent_s, silent_s=silent_s))
        return states


def num_reports(seconds: float, limit_s: float) -> int:
    """Return the number of reports after ``seconds`` in a stage: at the limit, and whenever the time has doubled."""
    return math.floor(math.log2(seconds / limit_s)) + 1 if seconds >= limit_s else 0


def describe(states: list[Heartbeat], limit_s: float) -> str:
    """Return the report: every rank's stage and time in it, and the ranks without heartbeats."""
    rows = [("rank", "host", "stage", "iteration", "seconds", "since", "")]
    for rank, beat in enumerate(states):
        note = f"no heartbeat for {beat.silent_s:.0f} s" if beat.silent_s else ""
        rows.append((str(rank), beat.host, beat.stage, str(beat.iteration), f"{beat.seconds:.0f}", beat.since, note))
    over = name_ranks(rank for rank, beat in enumerate(states) if beat.seconds >= limit_s)
    silent = [rank for rank, beat in enumerate(states) if beat.silent_s]
    return "\n".join(
        [
            f"watchdog: {over} in one stage for more than {limit_s:g} s",
            *align_columns(rows),
            f"no heartbeat (stopped, exited or unreachable): {name_ranks(silent)}" if silent else "all ranks respond",
        ]
    )
