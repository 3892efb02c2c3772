"""Files and folders that users name: checks before they are used, and writes that are whole or
absent.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hyvideo.data.text import quote

MAX_DIGITS = 300  # of an integer in JSON; a float has at most 309 before the point
PARTIAL = ".partial"  # end of the hidden names of `publish`
ROOT = Path(__file__).resolve().parents[2]  # root of the project


_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 64  # of a file of weights


def add_samples(digest: hashlib.blake2b, path: Path, name: str) -> None:
    """Add the name, the size and samples of the bytes of a large file to a hash.

    The samples are evenly spaced, so that other weights of the same shapes differ in some of them,
    also if only some matrices differ.
    """
    size = path.stat().st_size
    digest.update(f"{name} {size}\n".encode())
    with open(path, "rb") as file:
        for number in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def file_problem(path: str | Path, max_bytes: int) -> str | None:
    """Return why a path is not a readable regular file of at most ``max_bytes``; None if it is.

    Pipes are rejected.
    """
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISREG(status.st_mode):
        return (
            "it is a folder"
            if stat.S_ISDIR(status.st_mode)
            else "it is not a regular file; copy it to one first"
        )
    if status.st_size > max_bytes:
        return f"it has {status.st_size:,} bytes, the limit is {max_bytes:,}"
    return None if os.access(path, os.R_OK) else "no permission to read it"


def find_path(path: str | Path) -> Path:
    """Return the path of a file to read; files in the project's ``assets`` folder are found from
    any folder.
    """
    path = Path(path)
    is_asset = path.parts[:1] == ("assets",) and not os.path.isfile(path)
    return ROOT / path if is_asset else path


def folder_problem(path: str | Path) -> str | None:
    """Return why a path is not a readable folder, None if it is one."""
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    return None if os.access(path, os.R_OK | os.X_OK) else "no permission to read it"


def write_problem(folder: str | Path) -> str | None:
    """Return why files cannot be written to ``folder``, which may have to be created; None if they
    can.
    """
    if not str(folder).strip():
        return "its name is empty"
    existing = Path(folder)
    while isinstance(status := _status(existing), str):
        if status not in _CAN_BE_MADE:
            return status
        if existing.is_symlink():
            return f"{existing} is a broken link"
        existing = existing.parent
    if not stat.S_ISDIR(status.st_mode):
        return f"{existing} is not a folder"
    # create an unnamed file, because permission bits do not show that a file system such as /proc
    # has no files
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"no file can be created in {existing}: {error.strerror}"
    return None


def new_folder_problem(folder: Path) -> str | None:
    """Return why a path is not a new or empty folder that can be written, None if it is one."""
    if problem := write_problem(folder):
        return problem
    return "it is not empty" if os.path.lexists(folder) and os.listdir(folder) else None


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


# `write_problem` reports the second for the part
_CAN_BE_MADE = ("it does not exist", "a part of it is not a folder")


def _status(path: str | Path) -> os.stat_result | str:
    """Return the status of a path, following links, or the reason why it has none."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return _CAN_BE_MADE[0]
    except NotADirectoryError:
        return _CAN_BE_MADE[1]
    except OSError as error:  # too long, a loop of links, no permission on the way
        return (error.strerror or "it cannot be read").lower()
    except ValueError:  # a zero byte, or a lone surrogate
        return "it has characters that no path can have"


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON text.

    Raises ValueError if it is invalid, nested too deeply, or has an integer above any float or a
    name that occurs twice in an object.
    """
    try:
        return json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # all values but the last would be lost
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {quote(repeated, 60)} occurs twice in an object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits, the limit is {MAX_DIGITS}")
    return int(digits)


def read_regular(path: Path, max_bytes: int = 2**28) -> str:
    """Return the text of a regular file in UTF-8.

    Raises OSError for anything else; a pipe would never end.
    """
    if problem := file_problem(path, max_bytes):
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, "it does not exist", str(path))
        raise OSError(errno.EINVAL, problem, str(path))
    return path.read_text(encoding="utf-8")


def read_json(path: Path, label: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ValueError, naming the file, if it is missing or invalid.
    """
    if not path.is_file():
        raise ValueError(f"{label}: {path} does not exist")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
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
        if is_folder and path.is_dir():
            raise FileExistsError(errno.EEXIST, "the folder exists already", str(path))
        os.replace(hidden, path)
        sync(path.parent)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk: which one?
            error.filename = str(path)
        raise
    finally:
        if is_folder:
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove what killed processes have left of `publish` in a folder.

    Only the process that holds the folder's lease may call this.
    """
    for hidden in folder.glob(f".*{PARTIAL}"):
        if hidden.is_dir() and not hidden.is_symlink():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that creates a folder and locks it.

    The lock ends with the process, also if it is killed.

    A new folder is removed at the end if it is still empty. Raises ValueError if another process
    has the lock. File systems that cannot lock folders, such as NFS, are used without a lock.
    """
    is_new = not folder.exists()
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is writing to the folder {quote(folder)}; wait until it ends, or "
                "choose another one"
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with suppress(OSError):  # it has files
                folder.rmdir()


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
