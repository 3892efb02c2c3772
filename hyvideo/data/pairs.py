"""Rated pairs of videos from CSV files: a prompt, two videos, and which of them a rater preferred.

This file must not import torch or read videos at import, because pairs are checked before anything
slow is imported.
"""

import filecmp
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.csv_files import read_rows
from hyvideo.data.digests import digest_file, digest_of
from hyvideo.data.files import find_path
from hyvideo.data.prompts import Request, check_prompt, find_image, hash_requests
from hyvideo.data.randomness import permutation
from hyvideo.data.text import quote

COLUMNS = ("prompt", "first", "second", "answer")
OPTIONAL_COLUMNS = ("dimension", "ref_image_path")
TIE = 2
# answer -> index of the preferred video, or a tie
OUTCOMES = {"first": 0, "second": 1, "tie": TIE, "both_bad": TIE}
HELD_OUT = 0.15  # share of the prompts whose pairs are not trained on
LATENTS_SUFFIX = ".safetensors"  # of the file beside a video that has its latents
# the tensor in this file; the digest of the video in its metadata
LATENTS_KEY = "latents"
VIDEO_KEY = "video"


@dataclass(frozen=True)
class Rating:
    """One answer of a rater: a row of a pairs CSV."""

    request: Request
    videos: tuple[Path, Path]
    dimension: str  # of the question; empty without a column `dimension`
    outcome: int  # index of the preferred video, or TIE
    place: str  # row and file, for messages


@dataclass(frozen=True)
class Preference:
    """A rating without a tie, as a training example."""

    request: Request
    winner: Path
    loser: Path
    weight: float  # of the loss
    place: str  # row and file, for messages

    @property
    def videos(self) -> tuple[Path, Path]:
        return self.winner, self.loser


@dataclass(frozen=True)
class Example:
    """Videos of one prompt that an objective trains on."""

    request: Request
    videos: tuple[Path, ...]
    place: str  # row and file, for messages
    weight: float = 1.0  # of the loss


@dataclass(frozen=True)
class Examples:
    """Videos that a run trains on in place of rollouts. No prompt is in both parts."""

    train: Sequence[Example | Preference]
    held_out: Sequence[Example | Preference] = ()

    @property
    def all(self) -> list[Example | Preference]:
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
        missing = [column for column in COLUMNS if column not in row]
        if missing:
            raise ValueError(
                f"a pairs CSV needs the columns {', '.join(COLUMNS)}; {path} lacks "
                f"{', '.join(missing)}"
            )
        prompt, first, second, answer = (row[column].strip() for column in COLUMNS)
        if not prompt:
            raise ValueError(
                f"every row of a pairs CSV needs a prompt, {place} has none, so its videos cannot "
                "be trained on; add it or remove the row"
            )
        check_prompt(prompt, f"in {place}")
        answer = answer.casefold()
        if answer not in OUTCOMES:
            raise ValueError(
                f"the answer must be one of {', '.join(OUTCOMES)}, which are all that a rater can "
                f"give, got {quote(answer)} in {place}; correct it or remove the row"
            )
        videos = (_find_video(path, first), _find_video(path, second))
        for column, name, video in zip(COLUMNS[1:3], (first, second), videos):
            if not name or not os.path.isfile(video):
                raise ValueError(
                    f"{column} must be an existing video, relative to the folder of the CSV, got "
                    f"{quote(name)} in {place}; correct the path or remove the row"
                )
        image = row.get("ref_image_path", "").strip()
        try:
            picture = find_image(path, image) if image else None
        except ValueError as error:
            raise ValueError(f"ref_image_path in {place} must be an image file, {error}") from error
        dimension = row.get("dimension", "").strip()
        request = Request(prompt, picture, place=place)
        ratings.append(Rating(request, videos, dimension, OUTCOMES[answer], place))
    return ratings


def _find_video(csv_path: Path, name: str) -> Path:
    """Return the path of a video relative to the folder of a CSV, which may be from Windows."""
    path = csv_path.parent / name
    if not os.path.isfile(path):
        path = csv_path.parent / name.replace("\\", "/")
    return path


def select_preferences(
    ratings: Sequence[Rating], weights: Mapping[str, float], source: str
) -> list[Preference]:
    """Return the ratings without ties of the weighted dimensions; without ``weights``, all
    dimensions count equally.

    Raises ValueError for a weight of a dimension that nobody rated, a preference between equal
    videos, and if no preference remains. ``source`` names the files in messages.
    """
    rated = {rating.dimension for rating in ratings}
    unknown = [name for name in weights if name not in rated]
    if unknown:
        raise ValueError(
            "pair_weights must name dimensions of pairs_csv, "
            f"{', '.join(sorted(filter(None, rated))) or 'none'}, got "
            f"{', '.join(map(quote, unknown))}; remove them"
        )
    preferences = []
    for rating in ratings:
        weight = weights.get(rating.dimension, 0.0) if weights else 1.0
        if rating.outcome == TIE or weight == 0:
            continue
        winner, loser = rating.videos if rating.outcome == 0 else reversed(rating.videos)
        if winner == loser or filecmp.cmp(winner, loser, shallow=False):
            raise ValueError(
                "a preferred video must differ from the other one, because the gradient of equal "
                f"videos is zero, got two equal files in {rating.place}: {quote(winner)} and "
                f"{quote(loser)}; remove the row"
            )
        preferences.append(Preference(rating.request, winner, loser, weight, rating.place))
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


def check_videos(examples: Iterable[Example | Preference], size: tuple[int, int, int]) -> None:
    """Raise ValueError, naming the row, if a video cannot be read or has another number of frames
    or size in pixels.

    ``size`` is (frames, height, width) before `write_video` enlarges small videos.
    """
    from hyvideo.data.videos import mp4_factor, read_header  # imports torch

    frames, height, width = size
    factor = mp4_factor(height, width)
    sizes = dict.fromkeys([(height, width), (height * factor, width * factor)])
    seen: set[Path] = set()
    for example in examples:
        for video in example.videos:
            if video in seen:
                continue
            seen.add(video)
            try:
                found = read_header(video)
            except ValueError as error:
                raise ValueError(
                    f"{error}, in {example.place}; replace the file or remove the row"
                ) from error
            if (found.height, found.width) not in sizes or found.num_frames not in (frames, 0):
                expected = " or ".join(f"{each[0]} x {each[1]}" for each in sizes)
                raise ValueError(
                    f"a training video must have {frames} frames of {expected} pixels "
                    f"(sample_n_frames, height, width), got {found.num_frames} of {found.height} x "
                    f"{found.width} in {quote(video)}, {example.place}; change these settings "
                    "or generate the video again"
                )


def check_images(examples: Iterable[Example | Preference]) -> None:
    """Raise ValueError, naming the row, if a first frame cannot be read."""
    from hyvideo.data.images import read_image

    seen: set[str] = set()
    for example in examples:
        image = example.request.image
        if image is None or image in seen:
            continue
        seen.add(image)
        try:
            read_image(image)
        except ValueError as error:
            raise ValueError(
                f"{error}, in {example.place}; replace the file or remove the row"
            ) from error


def check_latents(examples: Iterable[Example | Preference], shape: tuple[int, int, int]) -> None:
    """Raise ValueError if latents beside a video have another shape, or are those of another video.

    ``shape`` is (frames, height, width) in latents.
    """
    from safetensors import SafetensorError, safe_open

    seen: set[Path] = set()
    remedy = (
        "restore the file, or delete it, so that the video is encoded (a resume then needs "
        "--allow_changed_settings pairs_csv)"
    )
    for example in examples:
        for video in example.videos:
            path = video.with_suffix(LATENTS_SUFFIX)
            if video in seen or not path.is_file():
                continue
            seen.add(video)
            try:
                with safe_open(path, framework="numpy") as file:
                    found = tuple(file.get_slice(LATENTS_KEY).get_shape())
                    owner = (file.metadata() or {}).get(VIDEO_KEY)
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{quote(path)} must have the latents of {video.name}: {error}; {remedy}"
                ) from error
            if found[1:] != shape or owner != digest_file(video):
                reason = f"shape {found}, not (channels, {', '.join(map(str, shape))})"
                if found[1:] == shape:
                    reason = "those of another video"
                raise ValueError(
                    f"{quote(path)} must have the latents of {video.name}, {example.place}, got "
                    f"{reason}; {remedy}"
                )


def split_by_prompt(preferences: Sequence[Preference], seed: int) -> Examples:
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
