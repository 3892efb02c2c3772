"""Checks of prompts: yes/no questions in a file of prompts, which a VLM judge asks about each video."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from hyvideo.data.prompts import Request, read_requests
from hyvideo.files.text import quote

MAX_CHECKS = 10
LIST = TypeAdapter(list[str])


def read_checks(paths: Sequence[str | Path]) -> dict[str, list[str]]:
    """Return the checks of each prompt in prompt files with a column ``checks``.

    Raises ValueError, naming the row, for any other, and for rows of one prompt with different
    checks, because a scorer sees only the prompt.
    """
    found: dict[str, list[str]] = {}
    rows: dict[str, str] = {}
    for request in read_requests(*paths):
        checks = parse_checks(request.checks or "", request.described)
        first = rows.setdefault(request.prompt, request.place)
        if found.setdefault(request.prompt, checks) != checks:
            raise ValueError(
                f"rows of one prompt must have the same checks: those of {quote(request.prompt, 60)} "
                f"differ in {first} and {request.place}; ask all questions in both"
            )
    return found


def has_checks(requests: Iterable[Request]) -> bool:
    """Return whether some prompts have checks."""
    return any(request.checks for request in requests)


def parse_checks(text: str, described: str) -> list[str]:
    """Return the checks in a JSON list. Raises ValueError for anything but different questions."""
    try:
        checks = LIST.validate_json(text)
    except ValueError:
        checks = []
    questions = {check for check in checks if check.endswith("?")}
    if not 0 < len(questions) == len(checks) <= MAX_CHECKS:
        raise ValueError(
            f"the column checks must have a JSON list of 1 to {MAX_CHECKS} different questions, "
            f'such as ["Is there a cat?", "Does it jump?"], got {quote(text) if text else "none"} '
            f"for {described}"
        )
    return checks
