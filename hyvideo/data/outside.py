"""Checks of user-supplied paths and text, error messages that quote them, and atomic file writes."""

import argparse
import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

MAX_PROMPT_BYTES = 100_000  # in UTF-8; the language model reads about 5,000 of them
MAX_MESSAGE = 4_000  # characters
MAX_DIGITS = 300  # of an integer in JSON; a float has at most 309 before the point

# Earlier names of flags, with the names that replace them.
OLD_NAMES = {
    "--out": ["--output_dir", "--output_path"],
    "--model_path": ["--reward_path", "--pretrained_model_root"],
    "--model": ["--reward_path"],
    "--options": ["--reward_config"],
}
ROOT = Path(__file__).resolve().parents[2]  # root of the project

# Control characters except newline and tab, and lone surrogates, which UTF-8 cannot encode.
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def file_problem(path: str | Path, max_bytes: int) -> str | None:
    """Return why a path is not a readable regular file of at most ``max_bytes``; None if it is. Pipes are rejected."""
    status = _status(path)
    if isinstance(status, str):
        return status
    if not stat.S_ISREG(status.st_mode):
        return "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file; copy it to one first"
    if status.st_size > max_bytes:
        return f"it has {status.st_size:,} bytes, the limit is {max_bytes:,}"
    return None if os.access(path, os.R_OK) else "no permission to read it"


def find_path(path: str | Path) -> Path:
    """Return the path of a file to read; files in the project's ``assets`` folder are found from any folder."""
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
    """Return why files cannot be written to ``folder``, which may have to be created; None if they can."""
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
    try:  # create an unnamed file, because permission bits do not show that a file system such as /proc has no files
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
    """Create a folder for output. Raises ValueError if this fails, which `write_problem` cannot always predict."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"the output must be a folder that can be created, got {quote(folder)}: {error.strerror}"
        ) from error
    with suppress(OSError):  # write permission does not imply read permission
        sync(folder.parent)


_CAN_BE_MADE = ("it does not exist", "a part of it is not a folder")  # `write_problem` reports the second for the part


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


def text_problem(text: str, max_bytes: int) -> str | None:
    """Return the first problem that makes ``text`` unusable as a prompt, None if there is none."""
    if match := _NO_TEXT.search(text):
        kind = "lone surrogate" if "\ud800" <= match[0] <= "\udfff" else "control character"
        return f"character {match.start() + 1} is the {kind} U+{ord(match[0]):04X}; remove it or save the text as UTF-8"
    if (size := len(text.encode())) > max_bytes:
        return f"it has {size:,} bytes in UTF-8, the limit is {max_bytes:,}; shorten it"
    return None


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON text. Raises ValueError if it is invalid, nested too deeply, or has an integer above any float."""
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits, the limit is {MAX_DIGITS}")
    return int(digits)


def read_regular(path: Path, max_bytes: int = 2**28) -> str:
    """Return the text of a regular file in UTF-8. Raises OSError for anything else; a pipe would never end."""
    if problem := file_problem(path, max_bytes):
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, "it does not exist", str(path))
        raise OSError(errno.EINVAL, problem, str(path))
    return path.read_text(encoding="utf-8")


def read_json(path: Path, label: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError, naming the file, if it is missing or invalid."""
    if not path.is_file():
        raise ValueError(f"{label}: {path} does not exist")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{label}: {path} is not valid JSON ({error})") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"{label}: {path} must contain a JSON object, got {type(content).__name__}")


def quote(text: object, longest: int = 200) -> str:
    """Return ``text`` in quotes for a message: truncated, with escapes for characters that cannot be printed."""
    text = str(text)
    return repr(text if len(text) <= longest else f"{text[:longest]}...")


def shorten(message: str, longest: int = MAX_MESSAGE) -> str:
    """Return a message without its middle if it is long, with control characters escaped."""
    clean = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message[: 100 * longest])
    if len(clean) <= longest:
        return clean
    return f"{clean[: longest // 2]} ... {clean[-longest // 2 :]}"


def describe_error(error: BaseException) -> str:
    """Return the type, text and notes of any exception, shortened so that it can be printed and recorded."""
    try:
        return shorten("; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    except Exception:  # the exception's own __str__ failed
        return f"{type(error).__name__}, whose text cannot be read"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line of text per row, with the cells aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def nearest(word: str, names: Iterable[str]) -> str:
    """Return ``did you mean NAME?`` for the name closest to a word, empty if none is close."""
    near = difflib.get_close_matches(word[:100].partition("=")[0], names, n=1)
    return f"did you mean {near[0]}?" if near else ""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of 120 columns that shows the defaults."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=120)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default if action.option_strings else None
        if default in (None, "", [], argparse.SUPPRESS) or default is False or not action.help:
            return action.help
        words = default if isinstance(default, str | int | float | Path) else " ".join(map(str, default))
        return f"{action.help} (default: {str(words).replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """Argument parser whose ``--help`` shows defaults, and that suggests a flag instead of an unknown one.

    A flag in OLD_NAMES stands for the first of its new names that is known. Error messages, which may quote a whole
    file, are shortened.
    """

    def __init__(self, description: str | None = None, **options):
        super().__init__(description=description, allow_abbrev=False, formatter_class=_HelpFormatter, **options)

    def parse_known_args(self, args=None, namespace=None):
        known = self._option_string_actions  # also of argument groups
        for old, names in OLD_NAMES.items():
            if old not in known and (new := next(filter(known.__contains__, names), None)):
                known[old] = known[new]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--\S+)", message)
        hint = nearest(unknown[1], self._option_string_actions) if unknown else ""
        super().error(shorten(f"{message}; {hint}" if hint else message, 1_000))


@contextmanager
def exit_on_error(
    program: str, errors: type[Exception] | tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """Context manager or decorator that turns user errors into one message and exit code 2.

    These include OSError: a path that cannot be read or written, or a full disk.
    """
    try:
        yield
    except errors as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{quote(error.filename)}: {error.strerror}"
        print(f"{program}: {shorten(text)}", file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Context manager that yields a temporary path, which replaces ``path`` unless an error is raised.

    Readers see the old or the new content, even after a power cut. The file gets the default mode of new files.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that creates a folder and locks it. The lock ends with the process, also if it is killed.

    A new folder is removed at the end if it is still empty. Raises ValueError if another process has the lock. File
    systems that cannot lock folders, such as NFS, are used without a lock.
    """
    is_new = not folder.exists()
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is writing to the folder {quote(folder)}; wait until it ends, or choose another one"
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
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
