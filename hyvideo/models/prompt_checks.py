"""Checks of prompts: yes/no questions that a language model writes once, and a VLM judge asks about each video."""

import csv
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from hyvideo.data.outside import find_path, parse_json, quote, replacing
from hyvideo.data.prompts import read_requests, read_rows
from hyvideo.models.chat_endpoint import ChatEndpoint

INSTRUCTION = Path(__file__).with_suffix(".txt")
FIELDS = {"temperature": 0, "max_tokens": 4096}
NUM_CHECKS = 5
NUM_REPAIRS = 2  # further requests after an answer that has no valid checks, which include the reason
ROWS_PER_WRITE = 32


def read_checks(path: str | Path) -> dict[str, list[str]]:
    """Return the checks of each prompt in a prompts CSV with a column ``checks``. Raises ValueError for any other."""
    rows = zip(read_requests(path), read_rows(find_path(path)))
    return {
        request.prompt: parse_checks(row.get("checks") or "", f"for {request.prompt!r:.60}") for request, row in rows
    }


def parse_checks(text: str, where: str = "as the answer") -> list[str]:
    """Return the checks in a JSON list. Raises ValueError unless it has five different questions."""
    try:
        checks = parse_json(text)
        is_valid = len({check for check in checks if check.endswith("?")}) == len(checks) == NUM_CHECKS
    except (ValueError, TypeError, AttributeError):
        is_valid = False
    if not is_valid or not isinstance(checks, list):
        raise ValueError(f"checks must be a JSON list of {NUM_CHECKS} different questions, got {quote(text)} {where}")
    return checks


def prepare_checks(rows: list[dict[str, str | None]], path: Path, endpoint: ChatEndpoint) -> None:
    """Add checks to the rows of a prompts CSV that have none, and write all rows to ``path`` after every few.

    Raises ValueError if some prompts have no valid checks after the repairs; the others are written.
    """
    problems = []
    for start in range(0, len(rows), ROWS_PER_WRITE):
        part = [row for row in rows[start : start + ROWS_PER_WRITE] if not row.get("checks")]
        found = _ask({row["prompt"].strip() for row in part}, endpoint)
        for row in part:
            checks, reason = found[row["prompt"].strip()]
            row["checks"] = json.dumps(checks) if checks else None
            problems += [] if checks else [f"{quote(row['prompt'], 60)}: {reason}"]
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, dict.fromkeys([*rows[0], "checks"]))
            writer.writeheader()
            writer.writerows(rows)
    if problems:
        advice = "start the same command again, which asks only for those"
        raise ValueError(f"{len(problems)} of {len(rows)} prompts have no checks: {problems[0]}; {advice}")


def _ask(prompts: Iterable[str], endpoint: ChatEndpoint) -> dict[str, tuple[list[str], str]]:
    """Return the checks of each prompt, or none and the reason."""
    system = {"role": "system", "content": INSTRUCTION.read_text(encoding="utf-8")}
    chats = {prompt: [system, {"role": "user", "content": prompt}] for prompt in prompts}
    found: dict[str, tuple[list[str], str]] = dict.fromkeys(chats, ([], ""))
    for _ in range(1 + NUM_REPAIRS):
        left = [prompt for prompt, (checks, _) in found.items() if not checks]
        bodies = [partial(json.dumps, {"model": endpoint.model, "messages": chats[p]} | FIELDS) for p in left]
        for prompt, (answer, reason) in zip(left, endpoint.ask(bodies, _text)):
            try:
                found[prompt] = (parse_checks(answer), "") if answer is not None else ([], reason)
            except ValueError as error:
                found[prompt] = [], str(error)
                repair = {"role": "user", "content": f"This answer cannot be used: {error}. Answer again."}
                chats[prompt] += [{"role": "assistant", "content": answer}, repair]
    return found


def _text(choice: dict) -> str:
    """Return the answer without reasoning and code fences."""
    text = (choice["message"]["content"] or "").rpartition("</think>")[2].strip()
    return text.removeprefix("```json").strip("`\n ")
