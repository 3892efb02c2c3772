"""Paired comparison of two policies from the scores of their videos, with the same prompts and
noise.

    gain of a pair = score of the policy - score of the base

The intervals are percentiles of the bootstrap: the mean gain of units drawn with replacement. The
units are pairs, as in public reports, or prompts with all of their pairs, which are wider when the
videos of a prompt resemble each other.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyvideo.files.files import read_text
from hyvideo.files.text import quote
from hyvideo.validation.intervals import CONFIDENCE, Interval
from hyvideo.validation.scores_file import NOT_SCORES

SCORES_FILE = "scores.json"
_RESAMPLES = 10_000
_Key = tuple[int, str, int | None]  # number, prompt and seed of a video


@dataclass(frozen=True)
class PairedGain:
    """Gain of a policy over the base in one score."""

    num_pairs: int
    base: float  # mean score
    over_pairs: Interval
    over_prompts: Interval
    wins: float  # fraction of the pairs; a tie counts as one half
    # mean gain and number of the pairs whose base video scores below or above the base's mean
    below: tuple[float, int]
    above: tuple[float, int]


def read_scores(path: Path) -> list[dict]:
    """Return the videos of a scores.json of scripts.evaluate or of a validation.

    ``path`` is the file or its folder. Raises ValueError for a file without them.
    """
    path = path / SCORES_FILE if path.is_dir() else path
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise ValueError(f"scores: {path}: {error}") from error
    videos = content.get("videos") if isinstance(content, dict) else content
    if not isinstance(videos, list):
        raise ValueError(
            f"{quote(path)} has no videos: give a scores.json of scripts.evaluate, or of a "
            "validation in samples/ of a run"
        )
    return videos


def paired_gains(base: Sequence[Mapping], policy: Sequence[Mapping]) -> dict[str, PairedGain]:
    """Return the gain in each score that both have; pairs with a missing score are left out.

    Raises ValueError if the videos have other prompts or seeds.
    """
    first, second = _by_key(base), _by_key(policy)
    if first.keys() != second.keys():
        raise ValueError(
            "the policies were scored on other videos, so they cannot be paired: the base has "
            f"{len(first)} videos and the policy {len(second)}, of which {len(first.keys() & second)} "
            "have the same number, prompt and seed. Score both with the same valid_video_csv, "
            "validation_repeats and validation_seed"
        )
    gains = {}
    for name in dict.fromkeys(name for video in base for name in video):
        pairs = [
            (key[1], float(first[key][name]), float(second[key][name]))
            for key in first
            if _is_score(name, first[key]) and _is_score(name, second[key])
        ]
        if pairs:
            prompts, of_base, of_policy = zip(*pairs)
            gains[name] = paired_gain(prompts, np.array(of_base), np.array(of_policy))
    return gains


def paired_gain(prompts: Sequence[str], base: np.ndarray, policy: np.ndarray) -> PairedGain:
    """Return the gain of the policy. Shape of the scores: (pairs,), in the order of ``prompts``."""
    gains = policy - base
    is_below = base < base.mean()
    by_prompt: dict[str, list[float]] = {}
    for prompt, gain in zip(prompts, gains):
        by_prompt.setdefault(prompt, []).append(gain)
    return PairedGain(
        num_pairs=len(gains),
        base=float(base.mean()),
        over_pairs=_bootstrap([[gain] for gain in gains]),
        over_prompts=_bootstrap(list(by_prompt.values())),
        wins=float(((gains > 0) + 0.5 * (gains == 0)).mean()),
        below=_mean_and_number(gains[is_below]),
        above=_mean_and_number(gains[~is_below]),
    )


def as_table(gains: Mapping[str, Mapping[str, PairedGain]]) -> str:
    """Return a Markdown table of the gains by policy and score."""
    lines = [
        "| policy | score | pairs | base | gain | 95 % over pairs | 95 % over prompts | wins | base "
        "below its mean | base above its mean |",
        "|" + "---|" * 10,
    ]
    for policy, by_score in gains.items():
        for score, gain in by_score.items():
            cells = (
                policy,
                score,
                str(gain.num_pairs),
                f"{gain.base:.3f}",
                f"{gain.over_pairs.mean:+.3f}",
                _limits(gain.over_pairs),
                _limits(gain.over_prompts),
                f"{100 * gain.wins:.0f} %",
                f"{gain.below[0]:+.3f} ({gain.below[1]})",
                f"{gain.above[0]:+.3f} ({gain.above[1]})",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_key(videos: Sequence[Mapping]) -> dict[_Key, Mapping]:
    return {(video["number"], video["prompt"], video.get("seed")): video for video in videos}


def _is_score(name: str, video: Mapping) -> bool:
    value = video.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and name not in (*NOT_SCORES, "advantage")


def _bootstrap(units: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of all values, with its interval over ``units`` drawn with replacement."""
    sums = np.array([sum(unit) for unit in units])
    counts = np.array([len(unit) for unit in units])
    drawn = np.random.default_rng(0).integers(len(units), size=(_RESAMPLES, len(units)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))


def _mean_and_number(gains: np.ndarray) -> tuple[float, int]:
    return (float(gains.mean()) if len(gains) else float("nan")), len(gains)


def _limits(interval: Interval) -> str:
    return f"[{interval.low:+.3f}, {interval.high:+.3f}]"
