"""Paths from outside: what is wrong with them, in words. The file system is asked, nothing is made.

``Path.exists`` says False of a loop of links and raises for a name that is too long: here both are told.
"""

import os
import stat
from pathlib import Path


def file_problem(path: str | Path, max_bytes: int) -> str | None:
    """Why this is no file that can be read whole, None if it is one. A pipe or a device has no end, or no second."""
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISREG(status.st_mode):
        return "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is no regular file; write it to one first"
    if status.st_size > max_bytes:
        return f"it has {status.st_size:,} bytes, and at most {max_bytes:,} are allowed"
    return None if os.access(path, os.R_OK) else "no permission to read it"


def folder_problem(path: str | Path) -> str | None:
    """Why this is no folder that can be read, None if it is one."""
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    return None if os.access(path, os.R_OK | os.X_OK) else "no permission to read it"


def is_file(path: str | Path) -> bool:
    status = _status(path)
    return not isinstance(status, str) and stat.S_ISREG(status.st_mode)


def unusable(path: str | Path) -> str | None:
    """Why nothing can be at a path, and the file system raises where it is asked; None where something may be."""
    status = _status(path)
    return status if isinstance(status, str) and status not in _CAN_BE_MADE else None


def unwritable(folder: str | Path) -> str | None:
    """Why nothing can be written there, None if something can, perhaps after the folder has been made."""
    if not str(folder).strip():
        return "it has no name"
    existing = Path(folder)
    if any(len(part.encode(errors="surrogateescape")) > _LONGEST_NAME for part in existing.parts):
        return f"a part of it has more than {_LONGEST_NAME} bytes"
    while isinstance(status := _status(existing), str):
        if status not in _CAN_BE_MADE:
            return status
        if existing.is_symlink():
            return f"{existing} is a link to what is not there"
        existing = existing.parent
    if not stat.S_ISDIR(status.st_mode):
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"no permission to write in {existing}"
    return None


_LONGEST_NAME = 255  # bytes, of a file or folder on every common file system
_CAN_BE_MADE = ("it is not there", "a part of it is not a folder")  # the second is said of the part


def _status(path: str | Path) -> os.stat_result | str:
    """Of what links lead to; a reason in words where there is nothing to ask about."""
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
