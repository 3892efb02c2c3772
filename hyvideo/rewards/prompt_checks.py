"""Checks of prompts: yes/no questions in a prompts CSV, which a VLM judge asks about each video."""

from pathlib import Path

from pydantic import TypeAdapter

from hyvideo.data.prompts import read_requests
from hyvideo.data.text import quote

MAX_CHECKS = 10
LIST = TypeAdapter(list[str])


def read_checks(path: str | Path) -> dict[str, list[str]]:
    """Return the checks of each prompt in a prompts CSV with a column ``checks``.

    Raises ValueError for any other.
    """
    return {
        r.prompt: parse_checks(r.checks or "", f"for {quote(r.prompt, 60)}")
        for r in read_requests(path)
    }


def parse_checks(text: str, where: str) -> list[str]:
    """Return the checks in a JSON list. Raises ValueError for anything but different questions."""
    try:
        checks = LIST.validate_json(text)
    except ValueError:
        checks = []
    questions = {check for check in checks if check.endswith("?")}
    if not 0 < len(questions) == len(checks) <= MAX_CHECKS:
        raise ValueError(
            f"checks must be a JSON list of 1 to {MAX_CHECKS} different questions, got "
            f"{quote(text)} {where}"
        )
    return checks
