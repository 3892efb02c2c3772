"""Prompts from files, and the prompts of each training iteration, which depend only on its
number and the seed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hyvideo.data.images import read_image
from hyvideo.data.randomness import permutation
from hyvideo.files.files import find_path, publish
from hyvideo.files.tables import Table, csv_text, find_file, read_table
from hyvideo.files.text import quote

COLUMNS = ("prompt", "ref_image_path", "ref_last_image_path", "seed", "original_prompt", "checks")


@dataclass(frozen=True)
class Request:
    """A video to generate: a prompt and, for image-to-video, the file of its first frame and perhaps
    that of its last frame.
    """

    prompt: str  # what the video shows
    image: str | None = None  # path of the first frame; None: text-to-video
    last_image: str | None = None  # path of the last frame, of a video that has a first one
    # of the initial noise in validation and generation; None: the run's or the call's seed
    seed: int | None = None
    # the negative prompt, whose quoted text is not encoded, as in the original pipeline
    is_negative: bool = False
    original_prompt: str | None = None  # the prompt before it was rewritten
    checks: str | None = None  # JSON list of yes/no questions about the video
    # row and file, for messages; empty if the prompt is from a flag
    place: str = field(default="", compare=False)

    @property
    def images(self) -> tuple[str, ...]:
        """Paths of the given frames: none, the first, or the first and the last."""
        return tuple(path for path in (self.image, self.last_image) if path is not None)

    @property
    def described(self) -> str:
        """The prompt and its place, for messages."""
        place = f" in {self.place}" if self.place else ""
        return f"the prompt {quote(self.prompt)}{place}"

    def seed_or(self, default: int) -> int:
        return default if self.seed is None else self.seed


def read_requests(*paths: str | Path) -> list[Request]:
    """Read the prompts of files or folders, as `read_table` does, in order: column ``prompt`` and,
    optionally, the others of ``COLUMNS``.

    An image path is relative to the folder of its file or to the working directory; a row without
    an image is text-to-video. Raises ValueError for a file without prompts, an invalid prompt or
    seed, or a missing image.
    """
    return PromptFiles().read(paths)


class PromptFiles:
    """Prompt files of a run.

    Each file is read once, so that all parts of the run see the same prompts.
    """

    def __init__(self) -> None:
        self._requests: dict[str, list[Request]] = {}  # by absolute path

    def read(self, paths: Iterable[str | Path]) -> list[Request]:
        """Return the rows of the files in order, as `read_requests` does.

        Raises ValueError for an invalid file.
        """
        requests: list[Request] = []
        for path in map(find_path, paths):
            file = os.path.abspath(path)
            if file not in self._requests:
                self._requests[file] = _read_prompts(path)
            requests += self._requests[file]
        return requests


def _read_prompts(path: Path) -> list[Request]:
    what = "a prompts file"
    table = read_table(path, what)
    rows = table.select(what, COLUMNS[:1], COLUMNS[1:])
    if not rows:
        raise ValueError(f"{what} must have at least one prompt, got none in {quote(path)}")
    requests = []
    for number, row in enumerate(rows, start=1):
        place = f"row {number} of {table.path}"
        # programs for tables write integers in a column with gaps as 1.0
        seed = row.get("seed", "").strip().removesuffix(".0")
        if seed and not (re.fullmatch(r"-?\d{1,20}", seed) and -(2**63) <= int(seed) < 2**64):
            raise ValueError(f"seed must be an integer (64 bits), got {quote(seed, 40)} in {place}")
        requests.append(
            replace(
                request_of(row, table, what, place),
                seed=int(seed) if seed else None,
                original_prompt=row.get("original_prompt", "").strip() or None,
                checks=row.get("checks", "").strip() or None,
            )
        )
    return requests


def request_of(row: dict[str, str], table: Table, what: str, place: str) -> Request:
    """Return the prompt of a row and its given frames. Raises ValueError, naming the ``place``."""
    prompt = row["prompt"].strip()
    if not prompt:
        raise ValueError(
            f"every row of {what} needs a prompt, {place} has none; add it or remove the row"
        )
    first = _picture(row, "ref_image_path", table, place)
    last = _picture(row, "ref_last_image_path", table, place)
    if last and not first:
        raise ValueError(
            f"a row with ref_last_image_path needs ref_image_path, the first frame, {place} has "
            "none; add it or remove the last frame"
        )
    return Request(prompt, first, last, place=place)


def _picture(row: dict[str, str], column: str, table: Table, place: str) -> str | None:
    """Return the path of a row's picture, None if the cell is empty.

    Raises ValueError for a missing file.
    """
    name = row.get(column, "").strip()
    if not name:
        return None
    picture = find_file(table.folder, name)
    if not picture:
        raise ValueError(
            f"{column} must be an image file, relative to {table.folder} or to the working "
            f"directory, got {quote(name)} in {place}; correct the path or remove the row"
        )
    return str(picture.resolve())


def write_requests(path: Path, requests: Sequence[Request]) -> None:
    """Write a prompts CSV. The paths of images are relative to its folder."""
    rows = []
    folder = path.parent.resolve()
    for request in requests:
        images = [
            image and os.path.relpath(image, folder)
            for image in (request.image, request.last_image)
        ]
        rows.append(
            [request.prompt, *images, request.seed, request.original_prompt, request.checks]
        )
    with publish(path) as temporary:
        temporary.write_text(csv_text(COLUMNS, rows), encoding="utf-8")


def are_seen(prompts: Iterable[str], training: Iterable[Request]) -> list[bool]:
    """Return for each prompt whether ``training`` has the same words, ignoring case and white
    space.
    """
    known = {" ".join(request.prompt.split()).casefold() for request in training}
    return [" ".join(prompt.split()).casefold() in known for prompt in prompts]


def hash_requests(requests: Sequence[Request]) -> str:
    """Return a hash of the prompts, in order, their seeds, questions (``checks``) and the contents
    of their images, not of file names.
    """
    paths = dict.fromkeys(path for request in requests for path in request.images)
    images = {path: hashlib.blake2b(Path(path).read_bytes()).hexdigest() for path in paths}
    rows = []
    for request in requests:
        row = [request.prompt, request.image and images[request.image]]
        if request.last_image:
            row.append({"last": images[request.last_image]})
        row += [value for value in (request.seed, request.checks) if value is not None]
        rows.append(row)
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def check_images(requests: Iterable[Request]) -> None:
    """Raise ValueError, naming the prompt, for a given frame that cannot be read."""
    first_uses: dict[str, Request] = {}
    for request in requests:
        for image in request.images:
            first_uses.setdefault(image, request)
    for image, request in first_uses.items():
        try:
            read_image(image)
        except ValueError as error:
            raise ValueError(f"{error}, for {request.described}") from error


@dataclass(frozen=True)
class PromptOrder:
    """Random order of the prompts, which visits each prompt once per epoch, with a new order in
    each epoch.
    """

    num_prompts: int
    prompts_per_iteration: int
    seed: int

    def indices(self, iteration: int) -> list[int]:
        """Return the indices of the prompts of ``iteration`` (from 1); one may occur twice where
        two epochs meet.
        """
        indices: list[int] = []
        start = (iteration - 1) * self.prompts_per_iteration
        while len(indices) < self.prompts_per_iteration:
            epoch, place = divmod(start + len(indices), self.num_prompts)
            order = permutation(self.num_prompts, self.seed, "prompt order", epoch)
            missing = self.prompts_per_iteration - len(indices)
            indices += order[place : place + missing]
        return indices
