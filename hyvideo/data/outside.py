"""What comes from outside, and what goes out: paths, text, and files that are whole or absent.

``Path.exists`` says False of a loop of links and raises for a name that is too long: here both are told in words.
"""

import argparse
import errno
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

MAX_PROMPT_BYTES = 100_000  # of UTF-8; the language model reads some 5,000 of them
MAX_MESSAGE = 4_000  # characters

ROOT = Path(__file__).resolve().parents[2]  # of the project

# Control characters but newline and tab; halves of characters, which UTF-8 cannot say and no file could keep.
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def file_problem(path: str | Path, max_bytes: int) -> str | None:
    """The reason why this is no file that can be read whole, None if it is one. Pipes and devices have no end."""
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISREG(status.st_mode):
        return "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is no regular file; write it to one first"
    if status.st_size > max_bytes:
        return f"it has {status.st_size:,} bytes, and at most {max_bytes:,} are allowed"
    return None if os.access(path, os.R_OK) else "no permission to read it"


def located(path: str | Path) -> Path:
    """The path of a file to be read: one below ``assets`` ships with the project, and is found from any folder."""
    path = Path(path)
    ships = path.parts[:1] == ("assets",) and not os.path.isfile(path)
    return ROOT / path if ships else path


def folder_problem(path: str | Path) -> str | None:
    """The reason why this is no folder that can be read, None if it is one."""
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    return None if os.access(path, os.R_OK | os.X_OK) else "no permission to read it"


def unusable(path: str | Path) -> str | None:
    """The reason why nothing can be at a path and the file system raises for it, None where something may be."""
    status = _status(path)
    return status if isinstance(status, str) and status not in _CAN_BE_MADE else None


def unwritable(folder: str | Path) -> str | None:
    """The reason why nothing can be written there, None if something can, perhaps after the folder has been made."""
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
    try:  # by a file without a name: permissions do not tell of a file system without files, as /proc
        tempfile.TemporaryFile(dir=existing).close()
    except PermissionError:
        return f"no permission to write in {existing}"
    except OSError as error:
        return f"no file can be made in {existing}: {error.strerror}"
    return None


def free_disk(folder: Path) -> int:
    """Free bytes for a folder, which may not be there yet."""
    above = (folder.absolute(), *folder.absolute().parents)
    return shutil.disk_usage(next(folder for folder in above if os.path.exists(folder))).free


def make_folder(folder: Path) -> None:
    """Makes a folder to write to. Raises ValueError where that fails, as `unwritable` cannot always foresee."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the output must be a folder that can be made, got {shown(folder)}: {error.strerror}"
        ) from error
    with suppress(OSError):  # who may write in a folder may not always read it
        sync(folder.parent)


_LONGEST_NAME = 255  # bytes, of a file or folder on every common file system
_CAN_BE_MADE = ("it is not there", "a part of it is not a folder")  # the second is said of the part


def _status(path: str | Path) -> os.stat_result | str:
    """The status of what links lead to, or a reason in words where there is nothing to ask about."""
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


def text_problem(text: str, max_bytes: int) -> str | None:
    """The first thing in ``text`` that no prompt may have, None where it is sound."""
    if match := _NO_TEXT.search(text):
        kind = "lone surrogate" if "\ud800" <= match[0] <= "\udfff" else "control character"
        return f"character {match.start() + 1} is the {kind} U+{ord(match[0]):04X}; take it out, or write it in UTF-8"
    if (size := len(text.encode())) > max_bytes:
        return f"it has {size:,} bytes in UTF-8, and at most {max_bytes:,} are allowed; shorten it"
    return None


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises ValueError for text that is none, or is nested until the stack is full."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def shown(text: object, longest: int = 200) -> str:
    """``text`` in quotes as a message quotes it: cut where it is long, with escapes for what cannot be printed."""
    text = str(text)
    return repr(text if len(text) <= longest else f"{text[:longest]}...")


def brief(message: str, longest: int = MAX_MESSAGE) -> str:
    """A message that quotes what it refuses, cut in its middle, and without characters that act on a terminal."""
    clean = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message[: 100 * longest])
    if len(clean) <= longest:
        return clean
    return f"{clean[: longest // 2]} ... {clean[-longest // 2 :]}"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line of text for each row, its cells below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


class Parser(argparse.ArgumentParser):
    """Parser without abbreviations, which quotes a part of what it refuses: a shell may expand a file into a flag."""

    def __init__(self, description: str | None = None, **options):
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter} | options
        super().__init__(description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        super().error(brief(message, 1_000))


@contextmanager
def refusals(program: str, errors: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Context or decorator that ends the program with code 2 and one message for an error of the user."""
    try:
        yield
    except errors as error:
        print(f"{program}: {brief(str(error))}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Context that gives a path to write to instead, which takes the place of ``path`` unless there is an error.

    Who reads ``path`` finds the old content or the new one, after a power cut too. The file has the mode that the
    system gives new files, where what writes it makes one for this user alone, as safetensors does.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.touch()
        mode = aside.stat().st_mode
        yield aside
        aside.chmod(mode)
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, would outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)
