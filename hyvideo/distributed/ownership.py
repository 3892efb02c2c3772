"""One life of a run has its folder: a file says which, and a heartbeat that it lives.

    output_dir/.owner    {"host": "node1", "namespace": "pid:[4026531836]", "pid": 4711, "life": "1f0c88ab"}

A life is over when its process is gone from this host, or no heartbeat is seen for a minute; then the next one takes
the folder. Should it come back, as from a node that was out of reach, it finds another life's name, shows no more
checkpoints and stops. No clocks are compared: the file's time must only change.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hyvideo.data.outside import make_folder, parse_json, replacing, shown
from hyvideo.distributed.collectives import anywhere, from_main, share_reason
from hyvideo.distributed.mesh import Mesh

_NAMESPACE = "/proc/self/ns/pid"  # containers on one host may share its name, and not its processes


class NotOwner(ValueError):
    """The folder of the run is another life's."""


class Ownership:
    """Context in which this life of a run has its folder. Every rank makes it; the main rank acts.

    Args:
        beat_s: Seconds between two heartbeats.
        silence_s: Seconds without one after which a life is over.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, beat_s: float = 10.0, silence_s: float = 60.0):
        self.path, self.mesh, self.beat_s, self.silence_s = folder / ".owner", mesh, beat_s, silence_s
        self.life = from_main(secrets.token_hex(4), mesh)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)

    def refuse_living(self) -> None:
        """Raises NotOwner, on all ranks, where another life has the folder. Waits for its heartbeat if it must."""
        if reason := share_reason(self._living() if self.mesh.is_main else None, self.mesh):
            raise NotOwner(reason)

    def __enter__(self) -> None:
        self.refuse_living()
        if self.mesh.is_main:
            make_folder(self.path.parent)
            with replacing(self.path) as aside:
                aside.write_text(json.dumps(_this_process() | {"life": self.life}))
            self._thread.start()

    def __exit__(self, *_exception) -> None:
        if self.mesh.is_main:
            self._ended.set()
            self._thread.join()
            if self.holds():
                self.path.unlink(missing_ok=True)

    def holds(self) -> bool:
        """Claims that no other life has taken the folder. Only the main rank asks."""
        try:
            found, _ = _read(self.path)
        except OSError:  # a disk that does not answer does not say so
            return True
        # Without a file it has been taken away by hand, unless it is not there yet or no more.
        return found.get("life") == self.life if found is not None else not self._thread.is_alive()

    def check(self) -> None:
        """Raises NotOwner on all ranks, which must all call, where another life has taken the folder."""
        if anywhere(self.mesh.is_main and not self.holds(), self.mesh):
            raise NotOwner(f"another life of the run has taken {self.path.parent}; this one stops and writes no more")

    def _beat(self) -> None:
        while not self._ended.wait(self.beat_s):
            with suppress(OSError):  # the next beat may reach the disk
                if self.holds():
                    os.utime(self.path)

    def _living(self) -> str | None:
        """The sentence on another life that has the folder, None if there is none."""
        (found, first), here = _read(self.path), _this_process()
        if found is None:
            return None
        is_here = all(found.get(name) == here[name] for name in ("host", "namespace"))
        if is_here and (found["pid"] == here["pid"] or not os.path.exists(f"/proc/{found['pid']}")):
            return None
        who, end = f"process {found.get('pid')} on {found.get('host')}", time.monotonic() + self.silence_s
        print(f"output_dir was left by {who}: waiting up to {self.silence_s:.0f} s for its heartbeat", file=sys.stderr)
        while time.monotonic() < end:
            time.sleep(self.beat_s / 10)
            if _read(self.path)[1] not in (first, None):
                return (
                    f"output_dir {shown(self.path.parent)} is in use by {who}; end that run, or name another "
                    f"output_dir; if it must not go on there, delete {self.path}, and it stops"
                )
        return None


def _this_process() -> dict:
    return {"host": socket.gethostname(), "namespace": os.readlink(_NAMESPACE), "pid": os.getpid()}


def _read(path: Path) -> tuple[dict | None, int | None]:
    """Words and time of the file: no words where they make no sense, None and None where there is no file."""
    try:
        with open(path, "rb") as file:  # opened, as a network file system gives the time of a name from its memory
            found, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
        words = parse_json(found)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except ValueError:
        words = None
    return words if isinstance(words, dict) else {}, changed
