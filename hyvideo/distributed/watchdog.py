"""Says which rank has been in which stage for how long when a run hangs. It ends nothing: collective_timeout does.

A thread of each rank writes a heartbeat (stage, iteration, seconds) to the store of torchrun's addresses, and the main
rank's thread reads them all. The process groups are not used: they belong to the training, and hang with it. Seconds
are differences of each rank's own monotonic clock, and silence is measured by that of the main rank, so a clock that is
set cannot raise the alarm. A rank over the limit shows its Python stack by itself, whether or not the store still
answers; where the main rank is the silent one, these stacks are all there is.
"""

import faulthandler
import json
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from hyvideo.data.outside import align_columns
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.rank_agreement import name_ranks, open_store

# A report comes at most two beats, a tenth of the limit, late: ``config.rules`` keeps that below collective_timeout.
LONGEST_BEAT_S = 5.0
BEATS_PER_LIMIT = 20
ENDED = "ended"
_CONNECT_S = 10.0
_STOP_S = 2.0
_STDERR = 2


@dataclass(frozen=True)
class Stay:
    """A rank's stage, and since when."""

    stage: str
    iteration: int
    since: float  # of time.monotonic


@dataclass(frozen=True)
class Heartbeat:
    """The state that a rank reports, and the main rank's view of it: a silent rank stays where it was."""

    host: str
    stage: str
    iteration: int
    seconds: float  # in this stage
    since: str  # wall time, for display
    silent_s: float = 0.0  # since the last one arrived; 0 while they come in time


class Watchdog:
    """Context that reports on stderr a rank that stays ``limit_s`` seconds in one stage; 0 watches nothing."""

    def __init__(self, mesh: Mesh, limit_s: float):
        self.mesh, self.limit_s = mesh, limit_s
        self.beat_s = min(LONGEST_BEAT_S, limit_s / BEATS_PER_LIMIT)
        self._stay = Stay("start", 0, time.monotonic())
        self._shown: Stay | None = None
        self._stopped = threading.Event()
        # A daemon: one that waits for a host that is gone must not keep the process.
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
        """Notes that this rank has come to a stage."""
        self._stay = Stay(stage, iteration, time.monotonic())

    def _run(self) -> None:
        roll, alarm = Roll(self.mesh, silent_after=max(4 * self.beat_s, 2.0)), Alarm(self.limit_s)
        try:
            store = dist.PrefixStore("watchdog", open_store(self.mesh, timeout_s=_CONNECT_S))
        except dist.DistError:
            store = None
        is_last, pause = False, 0.0  # the first heartbeat at once
        while not is_last:
            is_last = self._stopped.wait(pause)
            pause = self.beat_s
            stay = Stay(ENDED, self._stay.iteration, time.monotonic()) if is_last else self._stay
            heartbeat = self._heartbeat(stay)
            self._show_stack(stay, heartbeat)
            try:
                if store is not None:
                    store.set(str(self.mesh.rank), json.dumps(asdict(heartbeat)))
                    if self.mesh.is_main:
                        roll.read(store)
            except dist.DistError:  # it is gone, and with it the rank or node that served it
                store = None
            if self.mesh.is_main and not is_last:
                roll.hear(self.mesh.rank, heartbeat, time.monotonic())
                # Without a store, what was seen of the others is old.
                seen = [heartbeat] if store is None else roll.call(time.monotonic())
                if alarm.rings(max(one.seconds for one in seen)):
                    note = "; the store does not answer, so the other ranks are not known" if store is None else ""
                    sys.stderr.write(f"{describe(seen, self.limit_s)}{note}\n")  # at once: ranks' lines do not mix

    def _heartbeat(self, stay: Stay) -> Heartbeat:
        seconds = time.monotonic() - stay.since
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        return Heartbeat(socket.gethostname(), stay.stage, stay.iteration, seconds, since)

    def _show_stack(self, stay: Stay, heartbeat: Heartbeat) -> None:
        """Writes this rank's stack where it is over the limit, once for each stay in a stage."""
        if heartbeat.seconds < self.limit_s or stay is self._shown:
            return
        self._shown = stay
        sys.stderr.write(
            f"watchdog: rank {self.mesh.rank} ({heartbeat.host}) has been in stage {heartbeat.stage} of iteration "
            f"{heartbeat.iteration} for {heartbeat.seconds:.0f} s; its Python stack:\n"
        )
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)


class Roll:
    """Ranks that the main rank has heard of, and when, by its own clock."""

    def __init__(self, mesh: Mesh, *, silent_after: float):
        self.silent_after, self._own = silent_after, mesh.rank
        start = time.monotonic()
        self._last = dict.fromkeys(range(mesh.world_size), (Heartbeat("?", "?", 0, 0.0, "?"), start))

    def read(self, store: dist.Store) -> None:
        """Takes the heartbeats of the others. Only asks for what is there: the store would wait for the rest."""
        for rank in self._last:
            if rank != self._own and store.check([str(rank)]):
                self.hear(rank, Heartbeat(**json.loads(store.get(str(rank)))), time.monotonic())

    def hear(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Notes a heartbeat, if it is a new one: the seconds of no two are the same."""
        if self._last[rank][0] != heartbeat:
            self._last[rank] = (heartbeat, now)

    def call(self, now: float) -> list[Heartbeat]:
        """The last heartbeat of every rank, in their order."""
        seen = []
        for heartbeat, heard in self._last.values():
            is_silent = now - heard > self.silent_after and heartbeat.stage != ENDED
            silent_s = now - heard if is_silent else 0.0
            seen.append(replace(heartbeat, seconds=heartbeat.seconds + silent_s, silent_s=silent_s))
        return seen


class Alarm:
    """Rings at the limit, and again whenever the time has doubled since."""

    def __init__(self, limit_s: float):
        self.limit_s = self._next = limit_s

    def rings(self, seconds: float) -> bool:
        if seconds < self.limit_s:
            self._next = self.limit_s
        if seconds < self._next:
            return False
        while self._next <= seconds:
            self._next *= 2
        return True


def describe(seen: list[Heartbeat], limit_s: float) -> str:
    """The report on ranks from 0 on: who is in which stage for how long, and who is not heard of."""
    rows = [("rank", "host", "stage", "iteration", "seconds", "since", "")]
    for rank, last in enumerate(seen):
        note = f"silent for {last.silent_s:.0f} s" if last.silent_s else ""
        rows.append((str(rank), last.host, last.stage, str(last.iteration), f"{last.seconds:.0f}", last.since, note))
    over = name_ranks(rank for rank, last in enumerate(seen) if last.seconds >= limit_s)
    silent = [rank for rank, last in enumerate(seen) if last.silent_s]
    return "\n".join(
        [
            f"watchdog: {over} in one stage for more than {limit_s:g} s",
            *align_columns(rows),
            f"silent, so stopped, dead or out of reach: {name_ranks(silent)}" if silent else "no rank is silent",
        ]
    )
