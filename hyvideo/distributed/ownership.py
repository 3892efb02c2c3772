"""Ownership of the output folder: one process at a time owns it, recorded in a file with a
heartbeat.

    output_dir/.owner    {"host": "node1", "boot": "845b14d3-25fa-45fa-a811-d9ebc5e27e4d",
                          "namespace": "pid:[4026531836]", "pid": 4711, "token": "1f0c88ab"}

Another process takes over if the owner no longer exists on this host, or if no heartbeat, a new
modification time, is seen for a minute. A previous owner that reappears finds another token and
stops without publishing a checkpoint.
"""

import atexit
import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hyvideo.data.files import make_folder, parse_json, publish
from hyvideo.data.text import quote
from hyvideo.distributed.collectives import any_rank, from_main, raise_on_all_ranks
from hyvideo.distributed.mesh import Mesh

_NAMESPACE = Path("/proc/self/ns/pid")  # containers may share a hostname but not process ids
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name and namespace numbers


class NotOwner(ValueError):
    """Another process owns the output folder."""


class Ownership:
    """Context manager: within it, this run owns the output folder.

    All ranks enter it; only rank 0 uses the file.

    The owner sends a heartbeat every ``beat_s`` seconds and loses the folder after ``silence_s``
    seconds without one.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, beat_s: float = 10.0, silence_s: float = 60.0):
        self.path = folder / ".owner"
        self.mesh = mesh
        self.beat_s = beat_s
        self.silence_s = silence_s
        self.token = from_main(secrets.token_hex(4), mesh)
        self._is_taken = False
        self._is_new = False
        self._ended = threading.Event()
        # last heartbeat of another owner, and its deadline
        self._seen: tuple[int | None, float] | None = None
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)

    def take(self) -> None:
        """Acquire the folder, after waiting if its owner may be stale.

        Raises NotOwner on all ranks if it is alive.
        """
        must_wait = True
        while must_wait:
            with raise_on_all_ranks(self.mesh, errors=(NotOwner, ValueError)):
                must_wait = self.mesh.is_main and self._take_or_wait()
            # all ranks wait together, so that no collective times out
            must_wait = any_rank(must_wait, self.mesh)
            time.sleep(self.beat_s / 10 if must_wait else 0)
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
            with suppress(OSError):  # an unreadable file may belong to another process
                if (_read(self.path)[0] or {}).get("token") == self.token:
                    self.path.unlink(missing_ok=True)
                    if self._is_new:  # remove the folder if it is still empty
                        self.path.parent.rmdir()

    def is_held(self) -> bool:
        """Return whether this run still owns the folder. For the main rank only."""
        try:
            found, _ = _read(self.path)
        except OSError:  # an unresponsive disk does not imply another owner
            return True
        # While the heartbeat runs, a missing file means that the user deleted it.
        return (
            found.get("token") == self.token if found is not None else not self._thread.is_alive()
        )

    def check(self) -> None:
        """Raise NotOwner on all ranks if another process has taken the folder. Collective."""
        if any_rank(self.mesh.is_main and not self.is_held(), self.mesh):
            raise NotOwner(
                f"another process now owns {self.path.parent}, or {self.path} was deleted or moved; "
                "this process stops and writes nothing more"
            )

    def _beat(self) -> None:
        while not self._ended.wait(self.beat_s):
            with suppress(OSError):  # the next heartbeat may succeed
                if self.is_held():
                    os.utime(self.path)

    def _take_or_wait(self) -> bool:
        """Take the folder, or return True if the owner may be stale.

        Raises NotOwner if the owner is alive.
        """
        try:
            if self._must_wait():
                return True
            self._is_new = not self.path.parent.exists()
            make_folder(self.path.parent)
            with publish(self.path) as partial:
                partial.write_text(json.dumps(_this_process() | {"token": self.token}))
        except OSError as error:
            raise NotOwner(
                f"the owner file {quote(self.path)} must be readable and writable, got: "
                f"{error.strerror}; fix or delete it, or choose another output_dir"
            ) from error
        self._thread.start()
        atexit.register(self.__exit__)
        return False

    def _must_wait(self) -> bool:
        (owner, beat), current = _read(self.path), _this_process()
        if owner is None:
            return False
        is_local = all(owner.get(name) == current[name] for name in ("host", "boot", "namespace"))
        if is_local and (
            owner.get("pid") == current["pid"] or not os.path.exists(f"/proc/{owner.get('pid')}")
        ):
            return False
        owner_name = f"process {owner.get('pid')} on {owner.get('host')}"
        if self._seen is None:
            self._seen = beat, time.monotonic() + self.silence_s
            wait = f"waiting up to {self.silence_s:.0f} s for its heartbeat"
            print(f"output_dir is owned by {owner_name}: {wait}", file=sys.stderr)
        if beat != self._seen[0]:
            raise NotOwner(
                f"output_dir {quote(self.path.parent)} is in use by {owner_name}; stop that run or "
                f"choose another output_dir; deleting {self.path} also stops it"
            )
        return time.monotonic() < self._seen[1]


def _this_process() -> dict:
    host = {
        "host": socket.gethostname(),
        "boot": _BOOT.read_text().strip(),
        "namespace": str(_NAMESPACE.readlink()),
    }
    return host | {"pid": os.getpid()}


def _read(path: Path) -> tuple[dict | None, int | None]:
    """Return the owner and the modification time: ({}, time) for invalid contents, (None, None)
    without a file.
    """
    try:
        if path.is_fifo():
            raise OSError(errno.EINVAL, "it is a pipe")
        with open(path, "rb") as file:  # network file systems may cache the time of a path
            found, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
        contents = parse_json(found)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except ValueError:
        contents = None
    return contents if isinstance(contents, dict) else {}, changed
