"""Text from outside: what a prompt or a setting may hold, and how it is shown in a message."""

import json
import re
from typing import Any, NoReturn

MAX_PROMPT_BYTES = 100_000  # of UTF-8; the language model reads some 5,000 of them
MAX_SETTING_BYTES = 4_096
MAX_MESSAGE = 4_000  # characters

# Control characters but newline and tab; halves of characters, which UTF-8 cannot say and no file could keep.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def text_problem(text: str, max_bytes: int) -> str | None:
    """What ``text`` has that no prompt or setting may have, None where it is sound."""
    if found := _CONTROL.search(text):
        return (
            f"character {found.start() + 1} is the control character U+{ord(found[0]):04X}; take it out (a line break "
            "or a tab may stay)"
        )
    if found := _SURROGATE.search(text):
        return f"character {found.start() + 1} is the lone surrogate U+{ord(found[0]):04X}, no text; write it in UTF-8"
    # No character takes more than 4 bytes: most texts need not be encoded.
    if 4 * len(text) > max_bytes and (size := len(text.encode())) > max_bytes:
        return f"it has {size:,} bytes in UTF-8, and at most {max_bytes:,} are allowed; shorten it"
    return None


def parse_json(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError for text that is none, or is nested until the stack is full."""
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


class BriefErrors:
    """Of an ArgumentParser: what it refuses is quoted in part, where a shell expanded a whole file into a flag."""

    def error(self, message: str) -> NoReturn:
        super().error(brief(message, 1_000))
