"""Which files in the output folder of a run belong to the run: it replaces and removes these, and
no others.

    output_dir/.run                  {"run": "9f2c61d0", "has_saved": true}: identity of the run
    output_dir/samples/000050/.run   {"run": "9f2c61d0", "folder": "samples/000050"}: mark of a folder that it made

A run writes its identity at its first start, before any other file, in a folder without files of
the same names. It marks every numbered folder that it makes. A folder without its mark is never
written to, replaced or removed. A marked folder that also has files of other names is set aside
under another name instead of being removed.
"""

import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hyvideo.data.files import parse_json, publish, read_text, sync
from hyvideo.data.text import quote

MARK = ".run"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
ROLLOUTS = "rollouts"
NUMBERED = (CHECKPOINTS, SAMPLES, ROLLOUTS)  # folders of numbered folders, one for each iteration
LATEST = "latest"
METRICS = "metrics.jsonl"
# Single files that a run replaces.
FILES = (
    "config.yaml",
    METRICS,
    "report.html",
    "timeline.json",
    "before_after.png",
    "reward_hacking.json",
    "wandb/run_id",
    f"{CHECKPOINTS}/{LATEST}",
)
_MAX_BYTES = 2**20
_PARTIAL = r"\.[\w.-]+\.[0-9a-f]+\.partial"  # temporary files of `publish`
_VIDEO_FILES = re.compile(
    rf"\d{{3,}}\.mp4|scores\.json|measures\.json|{re.escape(MARK)}|{_PARTIAL}"
)
_CHECKPOINT_FILES = re.compile(
    r"tensors/(__\d+_\d+\.distcp|\.metadata(\.tmp)?)|lora/[\w.-]+\.(safetensors|json|partial)"
    rf"|(model|state|manifest)\.json|{re.escape(MARK)}"
)
# unfinished, or about to be deleted
_HIDDEN = re.compile(r"\.(\d{6,})(\.[0-9a-f]+)?\.(partial|removed|replaced)")


@dataclass(frozen=True)
class RunRecord:
    """Identity of the run in an output folder."""

    run: str
    has_saved: bool = False  # whether the run has written a checkpoint, which a restart then needs


def new_run() -> str:
    """Return the identity of a new run."""
    return secrets.token_hex(8)


def read_record(output_dir: Path) -> RunRecord | None:
    """Return the record of an output folder, or None without one.

    Raises ValueError for an unreadable record.
    """
    path = output_dir / MARK
    if not os.path.lexists(path):
        return None
    try:
        record = RunRecord(**_read(path))
        if not (isinstance(record.run, str) and isinstance(record.has_saved, bool)):
            raise ValueError("its values have the wrong types")
        return record
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{quote(path)} must be the record of the run in this folder, got: {error}; delete it "
            "if all other files in the folder belong to the run, or choose another output_dir"
        ) from error


def write_record(output_dir: Path, record: RunRecord) -> None:
    """Write the record. Raises OSError if this fails."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with publish(output_dir / MARK) as partial:
        partial.write_text(json.dumps(asdict(record)) + "\n")


def record_saved(output_dir: Path) -> None:
    """Record that the run has written a checkpoint; without a record of the run, write nothing."""
    record = read_record(output_dir)
    if record and not record.has_saved:
        write_record(output_dir, RunRecord(record.run, has_saved=True))


# --- marks of numbered folders --------------------------------------------------------------------


def claim(folder: Path, run: str) -> None:
    """Create a numbered folder with the mark of ``run``, unless it exists with this mark.

    Any rank may call this.

    Raises FileExistsError if something else has this name. Without a run (``""``), create the
    folder without a mark.
    """
    if not run:
        folder.mkdir(parents=True, exist_ok=True)
        return
    if not os.path.lexists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir()
        mark(partial, folder, run)
        try:
            os.rename(partial, folder)
        except OSError:  # another rank was faster
            shutil.rmtree(partial, ignore_errors=True)
    if not is_marked(folder, run):
        raise FileExistsError(
            errno.EEXIST, "this run has not made this folder; move it away", str(folder)
        )


def mark(folder: Path, as_folder: Path, run: str) -> None:
    """Write the mark of ``run`` into a folder that has, or will get, the name ``as_folder``."""
    (folder / MARK).write_text(json.dumps({"run": run, "folder": _name(as_folder)}) + "\n")


def is_marked(folder: Path, run: str) -> bool:
    """Return whether ``run`` has made a folder; False for a copy under another number."""
    found = mark_of(folder)
    return found is not None and found == run


def mark_of(folder: Path) -> str | None:
    """Return the run that has made a folder; None without a mark that fits the name of the
    folder.
    """
    try:
        found = _read(folder / MARK)
        return str(found["run"]) if found["folder"] == _name(folder) else None
    except (OSError, ValueError, KeyError):
        return None


def other_contents(folder: Path) -> list[str]:
    """Return the files in a numbered or hidden folder that have none of the names that a run writes
    there.
    """
    known = _CHECKPOINT_FILES if folder.parent.name == CHECKPOINTS else _VIDEO_FILES
    found = []
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in files + links:
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if not known.fullmatch(relative) or path.is_symlink():
                found.append(relative)
    return sorted(found)


def numbered(output_dir: Path, parent: str) -> Iterator[tuple[int, Path]]:
    """Yield number and path of each folder or link with the name of an iteration.

    Raises OSError if unreadable.
    """
    found: list[Path] = []
    with suppress(FileNotFoundError):  # unlike iterdir, glob treats an unreadable folder as empty
        found = sorted((output_dir / parent).iterdir())
    for path in found:
        if path.name.isascii() and path.name.isdigit() and path.name == f"{int(path.name):06d}":
            yield int(path.name), path


# --- removing and setting aside -------------------------------------------------------------------


def remove_after(
    output_dir: Path, iteration: int, run: str, corrupted: Collection[Path] = ()
) -> None:
    """Remove partial files of the run and its results after ``iteration``; ``corrupted``
    checkpoints are set aside.
    """
    for parent in NUMBERED:
        for hidden in (output_dir / parent).glob(".*"):
            if (
                _HIDDEN.fullmatch(hidden.name)
                and not hidden.is_symlink()
                and not other_contents(hidden)
            ):
                shutil.rmtree(hidden, ignore_errors=True)
    for name in FILES:
        path = output_dir / name
        for partial in path.parent.glob(f".{path.name}.*.partial"):
            # A folder may have files that another process has open.
            if re.fullmatch(_PARTIAL, partial.name) and not partial.is_dir():
                delete(partial, Path.unlink)
    for parent in NUMBERED:
        for number, path in numbered(output_dir, parent):
            if path in corrupted:
                delete(path, _keep_corrupted)
            elif number > iteration and is_marked(path, run):
                delete(path, remove)


def _keep_corrupted(folder: Path) -> None:
    kept = set_aside(folder, "-damaged")
    print(
        f"corrupted checkpoint {folder} is kept as {kept.name}; delete it manually",
        file=sys.stderr,
        flush=True,
    )


def delete(path: Path, function: Callable[[Path], object]) -> None:
    """Delete a path with ``function``, such as `discard` or `remove`.

    A failure is reported and not raised.
    """
    try:
        function(path)
    except OSError as error:
        print(f"\n{path} NOT DELETED ({error}); training continues", file=sys.stderr, flush=True)


def remove(folder: Path) -> None:
    """Hide a folder, then delete it, so that a crash leaves no partial checkpoint that looks
    complete.
    """
    discard(hide(folder))


def hide(folder: Path, suffix: str = "removed") -> Path:
    """Rename a folder to a hidden name, which checkpoint searches ignore."""
    hidden = folder.with_name(f".{folder.name}.{suffix}")
    if os.path.lexists(hidden):
        delete(hidden, discard)
    os.rename(folder, hidden)
    sync(folder.parent)
    return hidden


def discard(folder: Path) -> None:
    """Delete a hidden folder, or set it aside if it also has files that no run writes.

    Of a link, delete the link.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    if others := other_contents(folder):
        kept = set_aside(folder, "-kept")
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise OSError(
            errno.ENOTEMPTY,
            f"it has files that no run writes, {others[0]}{more}; kept as {kept.name}",
        )
    shutil.rmtree(folder)


def set_aside(folder: Path, suffix: str) -> Path:
    """Rename a numbered or hidden folder to NUMBER + ``suffix``, or with -2 etc. added, and return
    the new path.
    """
    hidden = _HIDDEN.fullmatch(folder.name)
    name = hidden[1] if hidden else folder.name
    target = folder.with_name(f"{name}{suffix}")
    count = 1
    while os.path.lexists(target):
        count += 1
        target = folder.with_name(f"{name}{suffix}-{count}")
    os.rename(folder, target)
    sync(folder.parent)
    return target


def _name(folder: Path) -> str:
    """Return the name of a numbered folder in its mark, such as ``samples/000050``, also while it
    is hidden.
    """
    hidden = _HIDDEN.fullmatch(folder.name)
    return f"{folder.parent.name}/{hidden[1] if hidden else folder.name}"


def _read(path: Path) -> dict:
    """Return the JSON object in a small file. Raises OSError or ValueError if there is none."""
    content = parse_json(read_text(path, _MAX_BYTES))
    if not isinstance(content, dict):
        raise ValueError(f"it contains {type(content).__name__} instead of a JSON object")
    return content
