"""The output folder of a run: which run it holds, which process writes it, and which of its folders
the run may delete.

    output_dir/run.json            the run: identity, settings, inputs, whether it has saved, how it ended
    output_dir/.lease              the process that writes here, which refreshes the file while it lives
    output_dir/samples/000050/.run the identity of the run that made this folder

A new run starts where no results are. Only folders with the mark of the run are deleted.
"""

import errno
import os
import re
import shutil
import sys
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout
from pydantic import BaseModel

from hyvideo.files.files import LEASE, PARTIAL, make_folder, publish, remove_partial, sync
from hyvideo.files.text import quote

RECORD = "run.json"
MARK = ".run"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
ROLLOUTS = "rollouts"
STOPPED_FOR_HACKING = "reward_hacking.json"  # why a run was stopped, which it then is again
NUMBERED = (CHECKPOINTS, SAMPLES, ROLLOUTS)  # folders of numbered folders, one for each iteration
# A folder with one of these has the results of a run. A log or a note is no result.
RESULTS = (RECORD, METRICS, *NUMBERED)
KEPT = ".kept"  # end of the name of a folder with files of others, which would be deleted otherwise
# what a run writes into a folder of videos
_OWN_FILES = re.compile(rf"\d+\.mp4|(scores|measures|noise)\.json|{re.escape(MARK)}")
# how a start has ended; other ends are errors
FINISHED = "finished"
STOPPED = "stopped by a signal, with everything saved"
LEASE_S = 60.0  # without a sign of life, after which another process may write the folder


class RunRecord(BaseModel):
    """The run in an output folder."""

    run: str  # identity
    started_from: str = ""  # checkpoint outside the folder that the run began with
    settings: dict[str, Any] = {}  # of its last start, by flag
    inputs: dict[str, str] = {}  # digests of what its last start read, by setting
    has_checkpoint: bool = False  # whether one was ever written, which a restart then needs
    end: str | None = None  # how the last start ended; None while it runs, and after a kill


def read_record(output_dir: Path) -> RunRecord | None:
    """Return the record of a folder, None without one.

    Raises ValueError for an invalid record, and OSError for one that cannot be read.
    """
    try:
        return RunRecord.model_validate_json((output_dir / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_record(output_dir: Path, record: RunRecord) -> None:
    """Write the record. Raises OSError if this fails."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with publish(output_dir / RECORD) as path:
        path.write_text(record.model_dump_json(indent=1) + "\n")


def update_record(output_dir: Path, **changes: object) -> None:
    """Change fields of the record; do nothing in a folder without one."""
    record = read_record(output_dir)
    if record is None:
        return
    updated = record.model_copy(update=changes)
    if updated != record:
        write_record(output_dir, updated)


def results_in(output_dir: Path) -> list[str]:
    """Return the names of the results in a folder. Empty files and folders are no results."""
    found = []
    for name in RESULTS:
        path = output_dir / name
        if path.is_dir():
            has_content = any(path.iterdir())
        else:
            has_content = path.is_file() and path.stat().st_size > 0
        if has_content:
            found.append(name)
    return found


class NotOwner(ValueError):
    """Another process writes the folder."""


class Lease:
    """The right of this process to write a folder: a context manager, which creates the folder.

    Another process takes it over if this one has died on its machine, or has given no sign of life
    for `LEASE_S` seconds, and a later lease of the same process takes it over at once. Whoever comes
    back later finds that it has lost the lease.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = SoftFileLease(
            folder / LEASE,
            lease_duration=LEASE_S,
            heartbeat_interval=LEASE_S / 6,
            thread_local=False,
        )
        self._is_new = False
        weakref.finalize(self, self._lock.release)  # also at the program's end

    def __enter__(self) -> "Lease":
        """Take the folder, after waiting for a process that may have died on another machine.

        Raises NotOwner if the other process lives, and OSError if the lease cannot be written.
        """
        self._is_new = not self.folder.exists()
        make_folder(self.folder)
        self._acquire()
        return self

    def _acquire(self) -> None:
        """Acquire the lease, or raise NotOwner as soon as its owner gives a sign of life."""
        if self._lock.is_lock_held_by_us:  # by a run in a notebook that was not ended
            self._lock.break_lock()
        if self._is_acquired(timeout=0):
            return
        owner = self._lock.owner
        name = f"process {owner.pid} on {owner.hostname}" if owner else "another process"
        print(f"{self.folder} is in use by {name}; waiting for its sign of life", file=sys.stderr)
        before = _status(self.folder / LEASE)
        started = time.monotonic()
        while not self._is_acquired(timeout=LEASE_S / 60):
            now = _status(self.folder / LEASE)
            waited = time.monotonic() - started
            is_alive = now is not None and now != before
            if is_alive or waited > LEASE_S + 5:
                raise NotOwner(
                    f"{quote(self.folder)} is in use by {name}; stop that program, or choose "
                    "another folder"
                )
            is_empty = now is not None and now[0] == 0
            # after a power cut; filelock waits for the owner of an empty file forever
            if is_empty and waited > LEASE_S:
                self._lock.break_lock()

    def _is_acquired(self, *, timeout: float) -> bool:
        """Return whether the lease could be acquired within ``timeout`` seconds."""
        try:
            self._lock.acquire(timeout=timeout)
        except Timeout:
            return False
        return True

    def check(self) -> None:
        """Raise NotOwner if another process has taken the folder, or a user has deleted the lease.

        A disk that does not answer is no sign of another process.
        """
        owner = self._lock.owner
        is_gone = owner is None and not os.path.lexists(self.folder / LEASE)
        if is_gone or (owner is not None and owner.token != self._lock.token):
            raise NotOwner(
                f"another process now writes {self.folder}, or its file {LEASE} was deleted; this "
                "process stops and writes nothing more"
            )

    def __exit__(self, *_exception) -> None:
        self._lock.release()
        if self._is_new:
            with suppress(OSError):  # it has files
                self.folder.rmdir()


def _status(path: Path) -> tuple[int, int] | None:
    """Return size and time of change of a file, None if it has been deleted."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


# --- numbered folders -----------------------------------------------------------------------------


def claim(folder: Path, run: str) -> None:
    """Create a numbered folder with the mark of ``run``, unless it exists with this mark.

    Any rank may call this. Raises FileExistsError if something else has this name. Without a run
    (``""``), create the folder without a mark.
    """
    if not run:
        folder.mkdir(parents=True, exist_ok=True)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not os.path.lexists(folder):
            with publish(folder, is_folder=True) as hidden:
                mark(hidden, run)
    except OSError:
        if not is_marked(folder, run):  # no other rank was faster
            raise
    if not is_marked(folder, run):
        raise FileExistsError(
            errno.EEXIST, "this run has not made this folder; move it away", str(folder)
        )


def mark(folder: Path, run: str) -> None:
    """Write the mark of ``run`` into a folder."""
    (folder / MARK).write_text(f"{run}\n")


def is_marked(folder: Path, run: str) -> bool:
    """Return whether ``run`` has made a folder."""
    try:
        return (folder / MARK).read_text().strip() == run
    except (OSError, UnicodeDecodeError):
        return False


def numbered(output_dir: Path, parent: str) -> Iterator[tuple[int, Path]]:
    """Yield number and path of each folder with the name of an iteration, the smallest first.

    Raises OSError if they cannot be listed.
    """
    found: list[Path] = []
    with suppress(FileNotFoundError):  # unlike iterdir, glob treats an unreadable folder as empty
        found = sorted((output_dir / parent).iterdir())
    for path in found:
        if path.name.isascii() and path.name.isdigit() and path.name == f"{int(path.name):06d}":
            yield int(path.name), path


def remove_after(output_dir: Path, iteration: int, run: str) -> None:
    """Remove what killed processes have left, and the videos of the run after ``iteration``."""
    remove_partial(output_dir)
    for parent in (SAMPLES, ROLLOUTS):
        remove_later(output_dir, parent, iteration, run, own_files=_OWN_FILES)


def remove_later(
    output_dir: Path, parent: str, iteration: int, run: str, *, own_files: re.Pattern
) -> None:
    """Remove the partial folders in ``parent``, and the folders of the run after ``iteration``."""
    remove_partial(output_dir / parent)
    for number, path in numbered(output_dir, parent):
        if number > iteration and is_marked(path, run):
            delete(path, own_files)


def delete(folder: Path, own_files: re.Pattern) -> None:
    """Delete a numbered folder that the run has made; a failure is reported and not raised.

    It is hidden first, so that no half of a checkpoint is left under its name. A folder with paths
    that ``own_files`` does not match, which somebody else has put there, is renamed instead.
    """
    try:
        others = [
            path
            for path in folder.rglob("*")
            if not path.is_dir() and not own_files.fullmatch(path.relative_to(folder).as_posix())
        ]
        if others:
            kept = free_name(folder, KEPT)
            os.rename(folder, kept)
            print(
                f"{folder} has files of others ({others[0].name}); kept as {kept}", file=sys.stderr
            )
            return
        hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
        os.rename(folder, hidden)
        sync(folder.parent)
        shutil.rmtree(hidden)
    except OSError as error:
        print(f"\n{folder} NOT DELETED ({error}); the run continues", file=sys.stderr, flush=True)


def free_name(folder: Path, end: str) -> Path:
    """Return ``folder`` with ``end`` after its name, and with more if that path exists."""
    free = folder.with_name(folder.name + end)
    if os.path.lexists(free):
        free = free.with_name(f"{free.name}-{uuid.uuid4().hex[:8]}")
    return free
