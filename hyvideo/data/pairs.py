"""Pairs of videos that raters compared: read from a CSV, checked, and split by prompt."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hyvideo.data.outside import located, shown
from hyvideo.data.prompts import check_prompt, read_rows
from hyvideo.data.randomness import permutation

TIE = 2
OUTCOMES = {"first": 0, "second": 1, "tie": TIE, "both_bad": TIE}  # by answer: two bad videos are as good as each other
COLUMNS = ("prompt", "first", "second", "dimension", "answer")
HELD_OUT = 0.15  # of the prompts, in each of the two parts that are not trained on


@dataclass(frozen=True)
class Pair:
    """Two videos of one prompt, and which of them a rater prefers in a dimension."""

    prompt: str
    videos: tuple[Path, Path]
    dimension: str
    outcome: int  # place of the preferred video, or TIE


class Split(NamedTuple):
    """Parts that share no prompt."""

    train: list[Pair]
    stop: list[Pair]  # that decide when training ends
    test: list[Pair]  # that nothing was chosen by


def read_pairs(path: str | Path) -> list[Pair]:
    """The rows of a CSV with ``COLUMNS``, paths of videos taken from its folder. Two of one file are no pair: left out.

    Raises ValueError for a file that is none, a video that is not there, another answer, and a prompt that is no text.
    """
    path = located(path)
    pairs = []
    for number, row in enumerate(read_rows(path, "a CSV of pairs", COLUMNS, ("rater",)), start=1):
        where = f"row {number} of {path}"
        prompt, first, second, dimension, answer = ((row[column] or "").strip() for column in COLUMNS)
        check_prompt(prompt, f"of {where}")
        if answer not in OUTCOMES:
            raise ValueError(f"answer must be one of {', '.join(OUTCOMES)}, got {shown(answer)} in {where}")
        videos = (path.parent / first, path.parent / second)
        if missing := [video for video in videos if not os.path.isfile(video)]:
            raise ValueError(f"first and second must be videos, got {shown(missing[0])} in {where}: no such file")
        if first != second:
            pairs.append(Pair(prompt, videos, dimension, OUTCOMES[answer]))
    return pairs


def split_by_prompt(pairs: Sequence[Pair], new: Sequence[str], *, seed: int) -> Split:
    """Pairs to train on, to stop by and to measure on; their prompts are drawn by ``seed``.

    Raises ValueError for fewer than three prompts, no pairs of a dimension in ``new``, and a dimension without a
    preference in some part: it could not be learned, or not be measured.
    """
    prompts = sorted({pair.prompt for pair in pairs})
    if len(prompts) < 3:
        raise ValueError(f"pairs must be of three prompts or more, as they are split by prompt, got {len(prompts)}")
    shuffled = [prompts[place] for place in permutation(len(prompts), seed, "pairs")]
    count = max(1, round(HELD_OUT * len(prompts)))
    parts = (shuffled[2 * count :], shuffled[:count], shuffled[count : 2 * count])
    split = Split(*([pair for pair in pairs if pair.prompt in part] for part in map(set, parts)))
    for name in dict.fromkeys((*new, *(pair.dimension for pair in pairs))):
        for part, content in split._asdict().items():
            if not any(pair.dimension == name and pair.outcome != TIE for pair in content):
                raise ValueError(
                    f"every dimension needs preferences in every part of the split by prompt, {name} has none in "
                    f"{part}; rate pairs of more prompts, or leave it out of --dimensions"
                )
    return split
