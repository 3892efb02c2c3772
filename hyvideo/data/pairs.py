"""Rated pairs of videos from CSV files: a prompt, two videos, and which of them a rater preferred.

This file must not import torch or read videos at import, because pairs are checked before anything
slow is imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.csv_files import read_rows
from hyvideo.data.examples import Example, Examples, check_columns, existing_video, request_of
from hyvideo.data.files import find_path
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import permutation
from hyvideo.data.text import quote

COLUMNS = ("prompt", "first", "second", "answer")
OPTIONAL_COLUMNS = ("dimension", "ref_image_path")
TIE = 2
# answer -> index of the preferred video, or a tie
OUTCOMES = {"first": 0, "second": 1, "tie": TIE, "both_bad": TIE}
HELD_OUT = 0.15  # share of the prompts whose pairs are not trained on


@dataclass(frozen=True)
class Rating:
    """One answer of a rater: a row of a pairs CSV."""

    request: Request
    videos: tuple[Path, Path]
    dimension: str  # of the question; empty without a column `dimension`
    outcome: int  # index of the preferred video, or TIE
    place: str  # row and file, for messages


def read_ratings(path: str | Path) -> list[Rating]:
    """Read the rows of a pairs CSV, with the columns ``COLUMNS`` and perhaps `dimension` and
    `ref_image_path`.

    Video paths are relative to the folder of the CSV. Raises ValueError, naming the row, for a
    missing prompt or video and an unknown answer.
    """
    path = find_path(path)
    ratings = []
    rows = read_rows(path, "a pairs CSV", (*COLUMNS, *OPTIONAL_COLUMNS))
    for number, row in enumerate(rows, start=1):
        place = f"row {number} of {path}"
        check_columns(row, COLUMNS, "a pairs CSV", path)
        request = request_of(row, path, "a pairs CSV", place)
        answer = row["answer"].strip().casefold()
        if answer not in OUTCOMES:
            raise ValueError(
                f"the answer must be one of {', '.join(OUTCOMES)}, which are all that a rater can "
                f"give, got {quote(answer)} in {place}; correct it or remove the row"
            )
        videos = (
            existing_video(path, row["first"], "first", place),
            existing_video(path, row["second"], "second", place),
        )
        dimension = row.get("dimension", "").strip()
        ratings.append(Rating(request, videos, dimension, OUTCOMES[answer], place))
    return ratings


def select_preferences(
    ratings: Sequence[Rating], weights: Mapping[str, float], source: str
) -> list[Example]:
    """Return the ratings without ties of the weighted dimensions, the preferred video first; without
    ``weights``, all dimensions count equally.

    Raises ValueError for a weight of a dimension that nobody rated, and if no preference remains.
    ``source`` names the files in messages.
    """
    rated = {rating.dimension for rating in ratings}
    unknown = [name for name in weights if name not in rated]
    if unknown:
        raise ValueError(
            "pair_weights must name dimensions of pairs_csv, "
            f"{', '.join(sorted(filter(None, rated))) or 'none'}, got "
            f"{', '.join(map(quote, unknown))}; remove them"
        )
    preferences: list[Example] = []
    for rating in ratings:
        weight = weights.get(rating.dimension, 0.0) if weights else 1.0
        if rating.outcome == TIE or weight == 0:
            continue
        winner, loser = rating.videos if rating.outcome == 0 else reversed(rating.videos)
        preferences.append(Example(rating.request, (winner, loser), rating.place, weight))
    if not ratings:
        raise ValueError(
            f"pairs_csv must have at least one preference, got no rows in {source}; add rated pairs"
        )
    if not preferences:
        raise ValueError(
            f"pairs_csv must have at least one preference, got none in the {len(ratings)} rows of "
            f"{source}: all answers are ties or of dimensions without a weight; rate more pairs or "
            "change pair_weights"
        )
    return preferences


def split_by_prompt(preferences: Sequence[Example], seed: int) -> Examples:
    """Hold out the preferences of 15 % of the prompts, at least one; with a single prompt, none."""
    prompts = sorted({preference.request.prompt for preference in preferences})
    count = min(len(prompts) - 1, max(1, round(HELD_OUT * len(prompts))))
    held_out = {
        prompts[place] for place in permutation(len(prompts), seed, "held-out pairs")[:count]
    }
    return Examples(
        train=[
            preference for preference in preferences if preference.request.prompt not in held_out
        ],
        held_out=[
            preference for preference in preferences if preference.request.prompt in held_out
        ],
    )
