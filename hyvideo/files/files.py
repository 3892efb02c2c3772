"""Files and folders that users name: checks before they are used, and writes that are whole or
absent.
"""

import errno
import glob
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hyvideo.files.text import describe_error, quote

LEASE = ".lease"  # name of the file of `run_folder.Lease`, which a killed process leaves
PARTIAL = ".partial"  # end of the hidden names of `publish`
# Root of the project: of the repository, or of an installed copy (setup.py).
ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "configs").is_dir():
    ROOT = Path(__file__).resolve().parents[1] / "project"


def file_problem(path: str | Path) -> str | None:
    """Return why a path is not a readable file, None if it is one."""
    try:
        open(path, "rb").close()
    except OSError as error:
        return _reason(error)
    return None


def find_path(path: str | Path) -> Path:
    """Return the path of a file to read; files in the project's folders ``assets`` and ``configs``
    are found from any folder.
    """
    path = Path(path)
    is_ours = path.parts[:1] in (("assets",), ("configs",)) and not os.path.exists(path)
    return ROOT / path if is_ours else path


def folder_problem(path: str | Path) -> str | None:
    """Return why a path is not a readable folder, None if it is one."""
    try:
        os.scandir(path).close()
    except OSError as error:
        return _reason(error)
    return None


# start of the name of a repository's folder in the cache of the Hugging Face Hub
CACHED_REPOSITORY = "models--"


def is_repository(path: str | Path) -> bool:
    """Return whether a path is the name of a repository of the Hugging Face Hub, "owner/model", and
    not a local folder.
    """
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path))) and not os.path.exists(path)


def write_problem(folder: str | Path) -> str | None:
    """Return why files cannot be written to ``folder``, which may have to be created; None if they
    can.
    """
    if not str(folder).strip():  # such as an unset variable; Path would take the current folder
        return "its name is empty"
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        # permission bits do not show that a file system such as /proc has no files
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"no file can be created in {existing}: {_reason(error)}"
    return None


def _reason(error: OSError) -> str:
    """Return why a path cannot be used."""
    if isinstance(error, FileNotFoundError):
        return "not found"
    return (error.strerror or "it cannot be read").lower()


def new_folder_problem(folder: Path) -> str | None:
    """Return why a path is not a new or empty folder that can be written, None if it is one."""
    problem = write_problem(folder)
    if problem:
        return problem
    is_used = os.path.lexists(folder) and os.listdir(folder) not in ([], [LEASE])
    return "it is not empty" if is_used else None


def free_disk(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet."""
    candidates = (folder.absolute(), *folder.absolute().parents)
    return shutil.disk_usage(next(folder for folder in candidates if os.path.exists(folder))).free


def make_folder(folder: Path) -> None:
    """Create a folder for output.

    Raises ValueError if this fails, which `write_problem` cannot always predict.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the output must be a folder that can be created, got {quote(folder)}: "
            f"{error.strerror}"
        ) from error
    with suppress(OSError):  # write permission does not imply read permission
        sync(folder.parent)


def read_text(path: str | Path) -> str:
    """Return the text of a file that a user names.

    Raises ValueError, naming the file, if it is missing, no readable file or not UTF-8. Other
    errors of the file system stay OSError, because a restart may succeed after them.
    """
    try:
        return find_path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError(f"file not found: {path}") from error
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise ValueError(f"{path} must be a readable file: {_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text ({error}); save it as UTF-8") from error


def read_json(path: Path, label: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ValueError, naming the file, if it is missing or invalid.
    """
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{label}: {path} is not valid JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"{label}: {path} must contain a JSON object, got {type(content).__name__}")


@contextmanager
def publish(path: str | Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Context manager that yields a hidden file, or a hidden new folder, which gets the name
    ``path`` unless an error is raised.

    Readers see the old or the new content of a file, even after a power cut, and a whole folder or
    none. A file of this name is replaced. A folder is not: OSError. The file gets the default mode
    of new files.
    """
    path = Path(path)
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        if is_folder:
            hidden.mkdir(parents=True)
        else:
            hidden.touch()
        mode = hidden.stat().st_mode  # safetensors writes files that only the user may read
        yield hidden
        hidden.chmod(mode)
        for written in hidden.rglob("*"):
            sync(written)
        sync(hidden)
        if is_folder and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "it exists already", str(path))
        os.replace(hidden, path)
        sync(path.parent)
    finally:
        if is_folder:
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)


@contextmanager
def optional(
    what: str, errors: tuple[type[Exception], ...] = (OSError,), *, is_shown: bool = True
) -> Iterator[list[Exception]]:
    """Context manager for what a run can do without, such as its videos: ``errors``, such as a full
    disk, are printed, and the run continues.

    Yields a list that has the error afterwards.
    """
    found: list[Exception] = []
    try:
        yield found
    except errors as error:
        found.append(error)
        if is_shown:
            print(
                f"\n{what} NOT WRITTEN ({describe_error(error)}); the run continues",
                file=sys.stderr,
                flush=True,
            )


def remove_partial(folder: Path, name: str = "") -> None:
    """Remove what killed processes have left of `publish` in a folder, of files whose names begin
    with ``name``.

    Only the process that writes these files may call this, such as the one that holds the folder's
    lease.
    """
    for hidden in folder.glob(f".{glob.escape(name)}*{PARTIAL}"):
        if hidden.is_dir() and not hidden.is_symlink():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot sync folders
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
