"""One life of a run has its folder: a file says which, and a heartbeat that it lives.

    output_dir/.owner    {"host": "node1", "namespace": "pid:[4026531836]", "pid": 4711, "life": "1f0c88ab"}

A life is over when its process is gone from this host, or when its heartbeat is not seen for a minute; then the next
one takes the folder. Should it come back all the same, as from a node that was out of reach, it finds another life's
name in the file, shows no more checkpoints and stops. No clocks are compared: the file's time must only change.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path

from hyvideo.data.outside import make_folder, parse_json, replacing, shown
from hyvideo.distributed.collectives import anywhere, from_main, share_reason
from hyvideo.distributed.mesh import Mesh

NAME = ".owner"
BEAT_S, SILENCE_S = 10.0, 60.0  # network file systems may show a file's time half a minute late
_NAMESPACE = Path("/proc/self/ns/pid")  # containers on one host may share its name, and not its processes


class NotOwner(ValueError):
    """The folder of the run is another life's."""


class Ownership:
    """Context in which this life of a run has its folder. Every rank makes it; the main rank acts.

    Args:
        beat_s: Seconds between two heartbeats.
        silence_s: Seconds without one after which a life is over.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S):
        self.path, self.mesh, self.beat_s, self.silence_s = folder / NAME, mesh, beat_s, silence_s
        self.life = from_main(secrets.token_hex(4), mesh)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)

    def refuse_living(self) -> None:
        """Raises NotOwner, on all ranks, where another life has the folder. Waits for its heartbeat if it must."""
        if reason := share_reason(self._living() if self.mesh.is_main else None, self.mesh):
            raise NotOwner(reason)

    def __enter__(self) -> "Ownership":
        self.refuse_living()
        if self.mesh.is_main:
            make_folder(self.path.parent)
            with replacing(self.path) as aside:
                aside.write_text(json.dumps(_this_process() | {"life": self.life}))
            self._thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self._ended.set()
        if self.mesh.is_main:
            self._thread.join()
            if self.holds():
                self.path.unlink(missing_ok=True)

    def holds(self) -> bool:
        """Claims that no other life has taken the folder. Only the main rank asks."""
        try:
            found = _read(self.path)
        except OSError:  # a disk that does not answer does not say so
            return True
        if found is None:  # taken away by hand, unless it is not there yet or no more
            return not self._thread.is_alive()
        return found.get("life") == self.life

    def check(self) -> None:
        """Raises NotOwner on all ranks, which must all call, where another life has taken the folder."""
        if anywhere(self.mesh.is_main and not self.holds(), self.mesh):
            raise NotOwner(f"another life of the run has taken {self.path.parent}; this one stops and writes no more")

    def _beat(self) -> None:
        while not self._ended.wait(self.beat_s):
            try:
                if self.holds():
                    os.utime(self.path)
            except OSError:  # a disk that does not answer; the next beat may reach it
                continue

    def _living(self) -> str | None:
        """The sentence on another life that has the folder, None if there is none."""
        found = _read(self.path)
        if found is None:
            return None
        place = {name: found.get(name) for name in ("host", "namespace")}
        who, here = f"process {found.get('pid')} on {found.get('host')}", _this_process()
        if place.items() <= here.items() and not _runs(found.get("pid")):
            return None
        print(f"output_dir was left by {who}: waiting up to {self.silence_s:.0f} s for its heartbeat", file=sys.stderr)
        first, end = _time_of(self.path), time.monotonic() + self.silence_s
        while time.monotonic() < end:
            time.sleep(self.beat_s / 10)
            if _time_of(self.path) not in (first, None):
                return (
                    f"output_dir {shown(self.path.parent)} is in use by {who}; end that run, or name another "
                    f"output_dir; if it must not go on there, delete {self.path}, and it stops"
                )
        return None


def _this_process() -> dict:
    namespace = os.readlink(_NAMESPACE) if _NAMESPACE.exists() else ""
    return {"host": socket.gethostname(), "namespace": namespace, "pid": os.getpid()}


def _read(path: Path) -> dict | None:
    """Words of the file: empty where it makes no sense; None where there is no file."""
    try:
        found = parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _time_of(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _runs(pid: object) -> bool:
    """Claims that another process of that number runs on this host."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, TypeError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return pid != os.getpid()
