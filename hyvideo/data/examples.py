"""Videos that a run trains on in place of rollouts: their prompts, their files, and CSV files of
them.

This file must not import torch or read videos at import, because given videos are checked before
anything slow is imported.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.prompts import Request, hash_requests, request_of
from hyvideo.data.video_files import ClipForm, read_header
from hyvideo.files.digests import digest_of
from hyvideo.files.tables import Table, find_file, read_table
from hyvideo.files.text import note, quote

COLUMNS = ("prompt", "video")
OPTIONAL_COLUMNS = ("ref_image_path", "ref_last_image_path", "score", "keep")
KEEP = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
KEEP |= {"1.0": True, "0.0": False}  # pandas, once a cell of the column is empty
# in the folder of scripts.rate
VIDEOS_FILE = "videos.csv"
PAIRS_FILE = "pairs.csv"
LATENTS_SUFFIX = ".safetensors"  # of the file beside a video that has its latents
# the tensor in this file; the digest of the video in its metadata
LATENTS_KEY = "latents"
VIDEO_KEY = "video"
VAE_KEY = "vae"  # digest of the weights of the VAE, in the metadata


@dataclass(frozen=True)
class Example:
    """Videos of one prompt that an objective trains on; of a rated pair, the preferred one first."""

    request: Request
    videos: tuple[Path, ...]
    place: str  # row and file, for messages
    weight: float = 1.0  # of the loss


@dataclass(frozen=True)
class Examples:
    """Videos that a run trains on in place of rollouts. No prompt is in both parts."""

    train: Sequence[Example]
    held_out: Sequence[Example] = ()

    @property
    def all(self) -> list[Example]:
        return [*self.train, *self.held_out]

    @property
    def requests(self) -> list[Request]:
        """Prompts that are trained on, each once."""
        return list(dict.fromkeys(example.request for example in self.train))

    @property
    def all_requests(self) -> list[Request]:
        return list(dict.fromkeys(example.request for example in self.all))

    @property
    def videos(self) -> list[Path]:
        """Videos of both parts, each once, in order."""
        return list(dict.fromkeys(path for example in self.all for path in example.videos))

    @property
    def digest(self) -> str:
        """Digest of the prompts, the order of the videos and the weights, without the contents of
        the videos.
        """
        requests = hash_requests([example.request for example in self.all])
        numbers = {video: number for number, video in enumerate(self.videos)}
        order = [[numbers[video] for video in example.videos] for example in self.all]
        return digest_of(requests, order, [example.weight for example in self.all])


def file_in_study(path: str, name: str, setting: str) -> str:
    """Return the path of a table; for the folder of a study, that of its file ``name``.

    Raises ValueError, naming the ``setting``, for a folder without this file.
    """
    if not os.path.isdir(path):
        return path
    file = os.path.join(path, name)
    if not os.path.isfile(file):
        raise ValueError(
            f"{setting} must be a table or the folder of a study with {name}, which scripts.rate "
            f"writes, got {quote(path)} without it; rate its videos, or give a table"
        )
    return file


def read_examples(paths: Sequence[str], keep_fraction: float) -> list[Example]:
    """Read tables of videos, files or folders, and return an example for each video that is trained
    on, in order.

    Columns: `prompt`, `video`, and perhaps `ref_image_path`, `ref_last_image_path`, `keep` (1 or 0)
    and `score`. Dropped are the videos with `keep` 0, and all but the best ``keep_fraction`` of the
    scored videos of each prompt (rounded up), so that no prompt is lost. Video paths are relative to
    the folder of their table or to the working directory. Raises ValueError, naming the row, for
    what is missing or not a number.
    """
    examples: list[Example] = []
    scores: dict[int, float] = {}
    lacking = ""
    for path in paths:
        table = read_table(path, "videos_csv")
        rows = table.select("videos_csv", COLUMNS, OPTIONAL_COLUMNS)
        for number, row in enumerate(rows, start=1):
            place = f"row {number} of {table.path}"
            if "keep" in row and not parse_keep(row["keep"], place):
                continue
            request = request_of(row, table, "videos_csv", place)
            video = existing_video(table, row["video"], "video", place)
            score = row.get("score", "").strip()
            if score:
                scores[len(examples)] = _number(score, place)
            else:
                lacking = lacking or place
            examples.append(Example(request, (video,), place))
    if keep_fraction < 1 and lacking:
        raise ValueError(
            f"keep_fraction {keep_fraction:g} needs a column `score` with a number in each row of "
            f"videos_csv, got none in {lacking}; add the scores or set keep_fraction 1"
        )
    if keep_fraction < 1:
        kept = _best(examples, scores, keep_fraction)
        examples = [example for place, example in enumerate(examples) if place in kept]
    if not examples:
        raise ValueError(
            f"videos_csv must have at least one video to train on, got none in {', '.join(paths)}; "
            "add rows, or set `keep` to 1 in some of them"
        )
    return examples


def _best(examples: Sequence[Example], scores: dict[int, float], fraction: float) -> set[int]:
    """Return the places of the best examples of each prompt: this fraction of them, rounded up."""
    by_request = defaultdict(list)
    for place, example in enumerate(examples):
        by_request[example.request].append(place)
    kept: set[int] = set()
    for places in by_request.values():
        ranked = sorted(places, key=lambda place: -scores[place])
        number = math.ceil(round(fraction * len(ranked), 9))  # 0.28 of 25 is 7
        kept.update(ranked[:number])
    return kept


def parse_keep(text: str, place: str) -> bool:
    """Return whether a cell of the column `keep` keeps its video. Raises ValueError, naming the row."""
    answer = text.strip().casefold()
    if answer not in KEEP:
        raise ValueError(
            f"keep must be 1 or 0, got {quote(text)} in {place}; correct it or remove the row"
        )
    return KEEP[answer]


def _number(text: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"score must be a number, got {quote(text)} in {place}; correct it or remove the row"
        )
    return number


def existing_video(table: Table, name: str, column: str, place: str) -> Path:
    """Return the path of the video in a cell. Raises ValueError, naming the row, for a missing file."""
    video = find_file(table.folder, name.strip())
    if video is None:
        raise ValueError(
            f"{column} must be an existing video, relative to {table.folder} or to the working "
            f"directory, got {quote(name)} in {place}; correct the path or remove the row"
        )
    return video


def check_videos(examples: Iterable[Example], form: ClipForm) -> None:
    """Raise ValueError, naming the row, if a video cannot be read or brought to the form of a
    training video; otherwise print what is done to how many.
    """
    places: dict[Path, str] = {}
    for example in examples:
        for video in example.videos:
            places.setdefault(video, example.place)
    changes: Counter[str] = Counter()
    for video, place in places.items():
        try:
            found = read_header(video)
            form.check(found, video)
        except ValueError as error:
            raise ValueError(f"{error} ({place})") from error
        changes.update(form.changes(found))
    if changes:
        done = "; ".join(f"{count} {change}" for change, count in changes.items())
        note(f"of {len(places)} videos to train on: {done}")
