"""For the tests of hostile input: whether it is used, or refused in one message, and what was written."""

import contextlib
import io
import time
from pathlib import Path

from hypothesis import HealthCheck, settings

from hyvideo.data.outside import brief

LONGEST = 5_000  # characters of a message
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


has_time = False  # --slow


def fuzzed(max_examples: int):
    """The same examples every time, in a folder that they share; a third of them unless there is time."""
    number = max_examples if has_time else max_examples // 3
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=shared)


def contents(folder: Path) -> set[str]:
    return {str(path) for path in folder.parent.rglob("*")}


def outcome(action, *, seconds: float = 5.0):
    """What ``action`` gives, or the message with which it refuses; all else that is raised is a failure."""
    said, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stderr(said):
            return action(), None
    except SystemExit as end:
        assert end.code == 2
        message = said.getvalue()
        assert message.count("error:") >= 1
    except ValueError as error:
        assert type(error) is ValueError, f"{type(error).__name__} is not raised by ours: {error}"
        message = brief(str(error))
    finally:
        assert time.perf_counter() - start < seconds
    assert 10 < len(message) <= LONGEST and "Traceback" not in message and "\x1b" not in message
    message.encode()
    return None, message
