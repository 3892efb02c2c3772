"""One life of a run has its folder: a file says which, and a heartbeat that it lives.

    output_dir/.owner    {"host": "node1", "boot": "845b14d3-25fa-45fa-a811-d9ebc5e27e4d",
                          "namespace": "pid:[4026531836]", "pid": 4711, "life": "1f0c88ab"}

A life is over when its process is gone from this host, or no heartbeat is seen for a minute; then the next one takes
the folder. Should it come back, as from a node that was out of reach, it finds another life's name, shows no more
checkpoints and stops. No clocks are compared: the file's time must only change.
"""

import atexit
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
from hyvideo.distributed.collectives import anywhere, failing_together, from_main
from hyvideo.distributed.mesh import Mesh

_NAMESPACE = Path("/proc/self/ns/pid")  # containers on one host may share its name, and not its processes
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name, as localhost, and number namespaces alike


class NotOwner(ValueError):
    """Another process owns the folder of the run."""


class Ownership:
    """Context in which this life of a run has its folder. Every rank makes it and enters it; the main rank acts.

    It is taken by `take`, or as it is entered, and given back as it is left, at the latest when the process ends. A
    heartbeat comes every ``beat_s`` seconds; after ``silence_s`` without one a life is over.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, beat_s: float = 10.0, silence_s: float = 60.0):
        self.path, self.mesh, self.beat_s, self.silence_s = folder / ".owner", mesh, beat_s, silence_s
        self.life = from_main(secrets.token_hex(4), mesh)
        self._is_taken, self._is_new, self._ended = False, False, threading.Event()
        self._seen: tuple[int | None, float] | None = None  # another life's last beat, and when its silence is over
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)

    def take(self) -> None:
        """Takes the folder. Raises NotOwner, on all ranks, where another life has it, after its silence if it must."""
        waits = True
        while waits:
            with failing_together(self.mesh, errors=(NotOwner, ValueError)):
                waits = self.mesh.is_main and self._take_or_wait()
            waits = anywhere(waits, self.mesh)  # in step: a rank alone would wait for longer than its messages may
            time.sleep(self.beat_s / 10 if waits else 0)
        self._is_taken = True

    def __enter__(self) -> None:
        if self._is_taken:
            self.check()
        else:
            self.take()

    def __exit__(self, *_exception) -> None:
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join()
            with suppress(OSError):  # what cannot be read may be another's
                if (_read(self.path)[0] or {}).get("life") == self.life:
                    self.path.unlink(missing_ok=True)
                    if self._is_new:  # a start that was refused leaves nothing
                        self.path.parent.rmdir()

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
            raise NotOwner(f"another process of the run has taken {self.path.parent}; this one ends and writes no more")

    def _beat(self) -> None:
        while not self._ended.wait(self.beat_s):
            with suppress(OSError):  # the next beat may reach the disk
                if self.holds():
                    os.utime(self.path)

    def _take_or_wait(self) -> bool:
        """Takes the folder, or claims that another life may still have it. Raises NotOwner where it has."""
        try:
            if self._must_wait():
                return True
            self._is_new = not self.path.parent.exists()
            make_folder(self.path.parent)
            with replacing(self.path) as aside:
                aside.write_text(json.dumps(_this_process() | {"life": self.life}))
        except OSError as error:
            raise NotOwner(
                f"{shown(self.path)} must be a file that can be read and written, as it says which run has the folder, "
                f"got: {error.strerror}; mend or delete it, or name another output_dir"
            ) from error
        self._thread.start()
        atexit.register(self.__exit__)
        return False

    def _must_wait(self) -> bool:
        (found, beat), here = _read(self.path), _this_process()
        if found is None:
            return False
        is_here = all(found.get(name) == here[name] for name in ("host", "boot", "namespace"))
        if is_here and (found.get("pid") == here["pid"] or not os.path.exists(f"/proc/{found.get('pid')}")):
            return False
        who = f"process {found.get('pid')} on {found.get('host')}"
        if self._seen is None:
            self._seen = beat, time.monotonic() + self.silence_s
            wait = f"waiting up to {self.silence_s:.0f} s for its heartbeat"
            print(f"output_dir was left by {who}: {wait}", file=sys.stderr)
        if beat != self._seen[0]:
            raise NotOwner(
                f"output_dir {shown(self.path.parent)} is in use by {who}; end that run, or name another "
                f"output_dir; to stop it from here, delete {self.path}"
            )
        return time.monotonic() < self._seen[1]


def _this_process() -> dict:
    place = {"host": socket.gethostname(), "boot": _BOOT.read_text().strip(), "namespace": str(_NAMESPACE.readlink())}
    return place | {"pid": os.getpid()}


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
