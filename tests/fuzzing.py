"""Helpers for tests of hostile input: generated examples, and whether an input is accepted or
rejected.
"""

import contextlib
import io
import time
from pathlib import Path

from hypothesis import HealthCheck, settings

from hyvideo.files.text import shorten

LONGEST = 5_000  # characters of an error message
ODD = [
    "",
    " ",
    "\0",
    "\x1b[2J",
    '"',
    '""',
    ",",
    "\n",
    "\r\n",
    "\r",
    "\ufeff",
    "\u202e",
    "é",
    "一只猫",
    "🐱",
    "👩‍👩‍👧",
    "\x85",
]


run_all_examples = False  # set by --slow


def fuzzed(max_examples: int):
    """Return hypothesis settings: reproducible examples in a shared folder, a third of them without
    --slow.
    """
    number = max_examples if run_all_examples else max_examples // 3
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=shared,
    )


def contents(folder: Path) -> set[str]:
    """Return all paths below the parent of a folder."""
    return {str(path) for path in folder.parent.rglob("*")}


def outcome(action, *, seconds: float = 5.0):
    """Return the result of ``action`` and its error message, one of them None.

    Other exceptions fail the test.
    """
    stderr, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stderr(stderr):
            return action(), None
    except SystemExit as end:
        assert end.code == 2
        message = stderr.getvalue()
        assert message.count("error:") >= 1
    except ValueError as error:
        assert type(error) is ValueError, (
            f"{type(error).__name__} must be a plain ValueError: {error}"
        )
        message = shorten(str(error))
    finally:
        assert time.perf_counter() - start < seconds
    assert 10 < len(message) <= LONGEST and "Traceback" not in message and "\x1b" not in message
    message.encode()
    return None, message
