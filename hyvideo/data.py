"""Prompts from a CSV file, and which of them an iteration trains on.

The position in the data is a function of the iteration, so a resumed run goes on where it stopped without a cursor.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from hyvideo.distributed.randomness import permutation


@dataclass(frozen=True)
class Request:
    """What a video is asked for: a prompt and, in image-to-video, the file of its first frame."""

    prompt: str
    image: str | None = None


def read_requests(path: str | Path) -> list[Request]:
    """The rows of a CSV file, in order: column ``prompt`` and, if there is one, ``ref_image_path``.

    An image's path is taken from the folder of the CSV or, if nothing is there, from the working directory. A row
    without one is text-to-video.

    Raises: ValueError for a file that is missing, not text, without the column, without a prompt in some row, or that
        names an image which is not there.
    """
    rows = _read_rows(path)
    if not rows:
        raise ValueError(f"a prompts CSV must have at least one row, got none in {path}")
    requests = []
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(
                f"row {number} of {path} has more cells than there are columns; a prompt with a comma needs double "
                f"quotes around it: {row['prompt']!r}"
            )
        prompt, image = ((row.get(column) or "").strip() for column in ("prompt", "ref_image_path"))
        if not prompt:
            raise ValueError(f"every row of a prompts CSV needs a prompt, row {number} of {path} has none")
        requests.append(Request(prompt, _find_image(image, Path(path), number) if image else None))
    return requests


def _read_rows(path: str | Path) -> list[dict[str, str | None]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if "prompt" not in (reader.fieldnames or []):
                columns = ", ".join(reader.fieldnames or []) or "no columns"
                raise ValueError(f"a prompts CSV needs a column named `prompt`, got {columns} in {path}")
            return list(reader)
    except OSError as error:
        raise ValueError(f"a prompts CSV must be a readable file, got {str(path)!r} ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"a prompts CSV must be UTF-8 text in CSV form, got {str(path)!r} ({error})") from error


def _find_image(name: str, csv_path: Path, row: int) -> str:
    tried = [csv_path.parent / name, Path(name)]
    for path in tried:
        if path.is_file():
            return str(path.resolve())
    places = " and ".join(dict.fromkeys(map(str, tried)))
    raise ValueError(f"ref_image_path of row {row} of {csv_path} must be an image file, looked for {places}")


@dataclass(frozen=True)
class PromptOrder:
    """Walks through all prompts in a random order, then through another, and so on."""

    num_prompts: int
    prompts_per_iteration: int
    seed: int

    def indices(self, iteration: int) -> list[int]:
        """Prompts of an iteration, counted from 1. One may come twice where one order ends and the next begins."""
        first = (iteration - 1) * self.prompts_per_iteration
        return [self._at(position) for position in range(first, first + self.prompts_per_iteration)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_prompts)
        return permutation(self.num_prompts, self.seed, "prompt order", epoch)[place]
