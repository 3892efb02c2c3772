"""Rated pairs of videos: a prompt, two videos, and which of them a rater preferred.

This file must not import torch or read videos at import, because pairs are checked before anything
slow is imported.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.examples import Example, Examples, existing_video
from hyvideo.data.prompts import Request, request_of
from hyvideo.data.randomness import permutation
from hyvideo.files.tables import Table, read_table
from hyvideo.files.text import note, quote

TIE = 2
# answer -> index of the preferred video, or a tie
OUTCOMES = {"first": 0, "second": 1, "tie": TIE, "both_bad": TIE}
HELD_OUT = 0.15  # share of the prompts whose pairs are not trained on


def _named_file(table: Table, cell: str) -> str:
    return cell


@dataclass(frozen=True)
class Form:
    """Columns of rated pairs, as a project or a data set writes them."""

    first: str
    second: str
    # columns of answers -> dimension; empty: a column `dimension` has it, or a JSON object in the
    # cell has an answer for each dimension
    answers: Mapping[str, str]
    # answer -> index of the preferred video, a tie, or None: the answer is left out
    outcomes: Mapping[str, int | None]
    # (table, cell) -> file that the cell of a video means
    file_of: Callable[[Table, str], str] = _named_file


def _videodpo_file(table: Table, cell: str) -> str:
    """Return the file of a number in VideoDPO's pair.json, which counts the entries of the
    metadata.json beside it; in the published archive, the winner and the loser of each pair in turn.
    """
    if not cell.isdecimal():
        return cell
    listed = _videodpo_list(table.folder)
    if int(cell) < len(listed):
        return listed[int(cell)]
    pair, is_loser = divmod(int(cell), 2)
    return f"{'losevideos' if is_loser else 'winvideos'}/{pair:06d}.mp4"


@functools.cache
def _videodpo_list(folder: Path) -> list[str]:
    listed = folder / "metadata.json"
    if not listed.is_file():
        return []
    return [row["video"] for row in read_table(listed, "pairs_csv").rows if "video" in row]


def _pickapic_file(table: Table, cell: str) -> str:
    return f"{cell}.jpg"


OURS = Form("first", "second", {"answer": ""}, OUTCOMES)
FORMS = (
    OURS,
    # VideoAlign and VideoGen-RewardBench
    Form(
        "path_A",
        "path_B",
        {"VQ": "VQ", "MQ": "MQ", "TA": "TA", "Overall": "Overall"},
        {"a": 0, "b": 1, "same": TIE, "invalid": None, "": None},
    ),
    # GenAI-Bench
    Form(
        "left_video",
        "right_video",
        {"vote_type": "Overall"},
        {"leftvote": 0, "rightvote": 1, "tievote": TIE, "bothbad_vote": TIE},
    ),
    # MJ-Bench-Video, where "Video 1" is video_0
    Form(
        "video_0_path",
        "video_1_path",
        {"overall_preference": "Overall", "category_preference": ""},
        {"video 1 better": 0, "video 2 better": 1, "same": TIE, "hard to judge": None, "": None},
    ),
    # HPDv3, where path1 is always preferred, and chosen and rejected samples
    Form("path1", "path2", {}, OUTCOMES),
    Form("chosen", "rejected", {}, OUTCOMES),
    Form("video1", "video2", {"label": "Overall"}, {"0": 0, "1": 1}, _videodpo_file),
    # Pick-a-Pic, whose labels sum to 1
    Form(
        "image_0_uid",
        "image_1_uid",
        {"label_0": "Overall"},
        {"1": 0, "1.0": 0, "0": 1, "0.0": 1, "0.5": TIE},
        _pickapic_file,
    ),
)
# Cells of rows that these data sets leave out themselves: MJ-Bench-Video and Pick-a-Pic.
LEFT_OUT = {"discard": "true", "has_label": "false", "are_different": "false"}


@dataclass(frozen=True)
class Rating:
    """One answer of a rater."""

    request: Request
    videos: tuple[Path, Path]
    dimension: str  # of the question; empty without one
    outcome: int  # index of the preferred video, or TIE
    place: str  # row and file, for messages


def read_ratings(path: str | Path) -> list[Rating]:
    """Read the answers in a table of pairs, in one of the ``FORMS``.

    Video paths are relative to the folder of the table or to the working directory. Raises
    ValueError, naming the row, for a missing prompt or video and an unknown answer.
    """
    what = "pairs_csv"
    table = read_table(path, what)
    columns = {column.casefold() for column in table.columns}
    form = next((form for form in FORMS if form.first.casefold() in columns), OURS)
    needed = ["prompt", form.first, form.second]
    if form is OURS:
        needed += form.answers
    optional = [*form.answers, "dimension", "ref_image_path", "ref_last_image_path", *LEFT_OUT]
    rows = table.select(what, needed, [name for name in optional if name not in needed])
    if rows and form.answers and not any(column in rows[0] for column in form.answers):
        raise ValueError(
            f"{what} needs one of the columns {', '.join(form.answers)} beside {form.first} and "
            f"{form.second}, which say what was preferred; {table.path} has none"
        )
    ratings = []
    left_out = 0
    for number, row in enumerate(rows, start=1):
        place = f"row {number} of {table.path}"
        if any(row.get(name, "").strip().casefold() == cell for name, cell in LEFT_OUT.items()):
            left_out += 1
            continue
        request = request_of(row, table, what, place)
        videos = tuple(
            existing_video(table, form.file_of(table, row[column].strip()), column, place)
            for column in (form.first, form.second)
        )
        for dimension, answer in _answers(row, form, place):
            folded = answer.strip().casefold()
            if folded not in form.outcomes:
                raise ValueError(
                    f"the answer must be one of {', '.join(filter(None, form.outcomes))}, got "
                    f"{quote(answer)} in {place}; correct it or remove the row"
                )
            outcome = form.outcomes[folded]
            if outcome is None:
                left_out += 1
            else:
                ratings.append(Rating(request, videos, dimension, outcome, place))
    if left_out:
        note(f"{table.path}: {left_out} answers without a preference or a tie are left out")
    return ratings


def _answers(row: Mapping[str, str], form: Form, place: str) -> list[tuple[str, str]]:
    """Return the dimensions and answers of a row. Raises ValueError, naming the row, for a cell
    that begins as a JSON object and is none.
    """
    if not form.answers:
        return [("Overall", "first")]
    answers: list[tuple[str, str]] = []
    for column, dimension in form.answers.items():
        cell = row.get(column)
        if cell is None:
            continue
        if cell.startswith("{"):
            try:
                each = json.loads(cell)
            except ValueError as error:
                raise ValueError(
                    f"{column} must be an answer or a JSON object of answers, got {quote(cell)} in "
                    f"{place}: {error}"
                ) from error
            answers += [(name, answer or "") for name, answer in each.items()]
        else:
            answers.append((dimension or row.get("dimension", "").strip(), cell))
    return answers


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
