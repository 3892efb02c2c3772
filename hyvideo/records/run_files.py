"""Small files of a run: JSON and text, and an entry of its scores. Imports no torch."""

import json
import math
from pathlib import Path

from hyvideo.files.files import publish
from hyvideo.rewards.rewards import Reward, overall


def score_entry(
    prompt: str,
    seed: int,
    group: int,
    reward: Reward,
    *,
    file: str | None,
    advantage: float,
    number: int,
) -> dict:
    """Return an entry of scores.json; ``number`` is the index of the video.

    Values that are not finite become null.
    """
    return {
        "number": number,
        "prompt": prompt,
        "seed": seed,
        "group": group,
        "file": file,
        "reward": or_none(reward.total),
        **{
            name: or_none(value)
            for name, value in (reward.scores | overall(reward.scores, "Overall")).items()
        },
        "advantage": or_none(advantage),
        "missing": reward.is_missing,
        "reason": reward.reason,
    }


def write_json(path: Path, content: list | dict) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with publish(path) as aside:
        aside.write_text(text, encoding="utf-8")


def evenly_spaced(count: int, total: int) -> list[int]:
    """Return ``count`` evenly spaced integers below ``total``, or all of them if there are
    fewer.
    """
    count = min(count, total)
    return [i * total // count for i in range(count)]


def or_none(value: float) -> float | None:
    """Return the value, or None if it is NaN, inf or not a number, as JSON requires."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
