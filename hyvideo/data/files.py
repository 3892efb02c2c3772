"""Files and folders that users name: checks before they are used, and writes that are whole or
absent.
"""

import errno
import glob
import io
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hyvideo.data.text import describe_error, quote

MAX_BYTES = 2**28  # of a text file
LEASE = ".lease"  # name of the file of `run_folder.Lease`, which a killed process leaves
PARTIAL = ".partial"  # end of the hidden names of `publish`
ROOT = Path(__file__).resolve().parents[2]  # root of the project


# of a network file system or a disk that may work again later
_STORAGE_FAILURES = (
    errno.EIO,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.ETIMEDOUT,
    errno.ENOLCK,
    errno.EBUSY,
)


class StorageFailure(OSError):
    """A failure of the storage, on this or another rank."""


def is_storage_failure(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is a failure of the storage that may be gone
    later, and not a mistake of the user.
    """
    while error is not None:
        if isinstance(error, StorageFailure):
            return True
        if isinstance(error, OSError) and error.errno in _STORAGE_FAILURES:
            return True
        error = error.__cause__
    return False


def file_problem(path: str | Path) -> str | None:
    """Return why a path is not a readable file, None if it is one."""
    try:
        open(path, "rb").close()
    except (OSError, ValueError) as error:
        return _reason(error)
    return None


def find_path(path: str | Path) -> Path:
    """Return the path of a file to read; files in the project's ``assets`` folder are found from
    any folder.
    """
    path = Path(path)
    is_asset = path.parts[:1] == ("assets",) and not os.path.isfile(path)
    return ROOT / path if is_asset else path


def folder_problem(path: str | Path) -> str | None:
    """Return why a path is not a readable folder, None if it is one."""
    try:
        os.scandir(path).close()
    except (OSError, ValueError) as error:
        return _reason(error)
    return None


def write_problem(folder: str | Path) -> str | None:
    """Return why files cannot be written to ``folder``, which may have to be created; None if they
    can.
    """
    if not str(folder).strip():
        return "its name is empty"
    if "\0" in str(folder):
        return "it has characters that no path can have"
    existing = Path(folder)
    try:
        while not os.path.lexists(existing):
            existing = existing.parent
        # permission bits do not show that a file system such as /proc has no files
        tempfile.TemporaryFile(dir=existing).close()
    except (OSError, ValueError) as error:
        return f"no file can be created in {existing}: {_reason(error)}"
    return None


def _reason(error: OSError | ValueError) -> str:
    """Return why a path cannot be used. Raises the error if the storage has failed, because a
    restart may succeed then.
    """
    if isinstance(error, ValueError):
        return "it has characters that no path can have"
    if is_storage_failure(error):
        raise error
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


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file in UTF-8.

    Raises OSError if it cannot be read, and ValueError if it is too large or not UTF-8.
    """
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)  # a size that the file states may be wrong
    if len(content) > max_bytes:
        raise ValueError(f"{path} is too large; the limit is {max_bytes:,} bytes")
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()


def parse_json(text: str | bytes) -> Any:
    """Return the value that JSON text stands for.

    Raises ValueError if it is invalid, or nested too deeply for Python.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, label: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ValueError, naming the file, if it is missing or invalid.
    """
    try:
        content = parse_json(read_text(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{label}: file not found: {path}") from error
    except (ValueError, IsADirectoryError, PermissionError) as error:
        raise ValueError(f"{label}: {path} is not valid JSON ({error})") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"{label}: {path} must contain a JSON object, got {type(content).__name__}")


@contextmanager
def publish(path: str | Path, *, is_folder: bool = False) -> Iterator[Path]:
    """Context manager that yields a hidden file, or a hidden new folder, which gets the name
    ``path`` unless an error is raised.

    Readers see the old or the new content of a file, even after a power cut, and a whole folder or
    none. A file of this name is replaced. A folder is not: FileExistsError. The file gets the
    default mode of new files. Raises OSError that names the file if the disk is full.
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
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # another process was faster
            raise FileExistsError(errno.EEXIST, "it exists already", str(path)) from error
        # a full disk: which one? Copying names the source
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.errno is not None and (error.filename is None or is_full):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    except SafetensorError as error:  # also of a full disk
        raise OSError(f"{path}: {error}") from error
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
