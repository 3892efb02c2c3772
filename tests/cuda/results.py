"""The results of a check of a GPU: gpu.json, gpu.md and the measured beside the expected numbers."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hyvideo.files.files import publish


class Number(NamedTuple):
    """A measured number of the summary, its expected range, and what to do outside of it."""

    title: str
    row: str  # regular expression for the test
    value: str  # name of the recorded value
    expected: str
    low: float
    high: float
    advice: str

    def values(self, results: Sequence[dict]) -> list[float]:
        rows = [row for result in results for row in result["rows"]]
        values = [row.get(self.value) for row in rows if re.fullmatch(self.row, row["what"])]
        return [value for value in values if isinstance(value, int | float)]


def write(out: Path, title: str, results: Sequence[dict], numbers: Sequence[Number]) -> None:
    """Write gpu.json and gpu.md to a folder.

    Args:
        results: One dictionary for each lane: lane, ok, seconds, expected, reason, rows.
    """
    lines = [f"# {title}", "", *summary(results, numbers)]
    lines += ["| lane | seconds | expected | result |", "|---|---|---|---|"]
    for result in results:
        end = {True: "passed", False: result["reason"], None: "unfinished"}[result["ok"]]
        seconds = f"{result['seconds']:.0f} | {result['expected']:.0f}"
        lines.append(f"| {result['lane']} | {seconds} | {_text(end)} |")
    lines += ["", "| lane | ok | what | result |", "|---|---|---|---|"]
    for result in results:
        for row in result["rows"]:
            values = ", ".join(
                f"{name} {_text(value)}"
                for name, value in row.items()
                if name not in ("what", "ok")
            )
            ok = {True: "yes", False: "**no**", None: "unfinished"}[row["ok"]]
            lines.append(f"| {result['lane']} | {ok} | {_text(row['what'])} | {values} |")
    for name, text in (
        ("gpu.json", json.dumps(results, indent=1)),
        ("gpu.md", "\n".join(lines) + "\n"),
    ):
        with publish(out / name) as path:
            path.write_text(text)


def summary(results: Sequence[dict], numbers: Sequence[Number]) -> list[str]:
    """Return the lines of a table of measured beside expected numbers, with what to do if one is
    out of range; empty if no number was measured.
    """
    lines = []
    for number in numbers:
        for value in number.values(results):
            advice = "" if number.low <= value <= number.high else number.advice
            lines.append(f"| {number.title} | {value:.3g} | {number.expected} | {advice} |")
    if not lines:
        return []
    return ["| number | measured | expected | if it differs |", "|---|---|---|---|", *lines, ""]


def _text(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")
