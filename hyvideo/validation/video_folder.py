"""Folders of videos with their prompts: written by generate.py or a run, with captions, or in the
order of a prompts file.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hyvideo.data.examples import COLUMNS, read_examples
from hyvideo.data.prompts import Request
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.files.files import folder_problem, read_json
from hyvideo.files.tables import csv_text, has_captions, videos_in
from hyvideo.files.text import note, quote
from hyvideo.records.run_files import write_text
from hyvideo.validation import parts

SCORES_FILE = "scores.json"
CUT_NAME = 20  # characters of a name that is the start of a prompt, at least
# Entries in the JSON files of generate.py that all videos of a call have in common, and that change
# the videos.
COMMON_SETTINGS = (
    "model",
    "version",
    "checkpoint",
    "lora",
    "lora_scale",
    "policy_hash",
    "steps",
    "shift",
    "expert",
    "base_lora",
    "low_noise_base_lora",
    "guidance_scale",
    "low_noise_guidance_scale",
    "guidance_interval",
    "negative_prompt",
    "sde_type",
    "eta",
    "frames",
    "fps",
    "dtype",
    "initial_noise",
    "step_caching",
    "use_sageattn",
)


@dataclass(frozen=True)
class Clip:
    """A video file and its prompt."""

    path: Path
    prompt: str
    group: int  # index of the prompt
    seed: int | None  # of the initial noise, if it is recorded
    image: str | None = None  # first frame
    last_image: str | None = None


def find_clips(
    folder: Path, requests: list[Request], *, setting: str = "valid_video_csv"
) -> list[Clip]:
    """List the videos of a folder with their prompts, from a run's scores.json, from JSON files
    beside them, or from their captions (`read_table`).

    Without these, the names of the files say which of the ``requests`` they show, or the numbers in
    their names give the order of the requests, equally many for each; the first and the last pair
    are printed. Messages name the ``setting`` that has the requests. Raises ValueError for unknown
    prompts, for a corrupted scores.json, and for videos of several policies or settings.
    """
    paths = videos_in(folder)
    if not paths:
        problem = folder_problem(folder) or "it contains no video"
        raise ValueError(f"--videos must be a folder with videos, got {quote(folder)}: {problem}")
    recorded = _recorded(folder)
    if recorded:
        return recorded
    if any(path.with_suffix(".json").is_file() for path in paths):
        records = [read_json(path.with_suffix(".json"), "--videos") for path in paths]
        _check_common_settings(paths, records)
        places = {
            prompt: place
            for place, prompt in enumerate(dict.fromkeys(record["prompt"] for record in records))
        }
        clips = []
        for path, record in zip(paths, records):
            seed = record.get("seed")
            if not isinstance(seed, int):
                seed = None
            prompt = record["prompt"]
            images = (record.get("image"), record.get("last_image"))
            clips.append(Clip(path, prompt, places[prompt], seed, *images))
        return clips
    if has_captions(folder):
        return _captioned(folder)
    places = _places_by_name(paths, requests, setting)
    how = "by their names"
    if places is None:
        if not requests or len(paths) % len(requests):
            raise ValueError(
                "the number of videos without captions must be a multiple of the rows of "
                f"{setting}, because videos of a row follow one another, got {len(paths)} "
                f"videos in {folder} and {len(requests)} rows; add the missing videos, or a text "
                "file with the prompt beside each video"
            )
        paths = _by_row(paths, len(requests))
        places = [number * len(requests) // len(paths) for number in range(len(paths))]
        how = "in the order of the numbers in their names"
    owners = [requests[place] for place in places]
    note(
        f"{folder}: {len(paths)} videos have the prompts of {setting} {how}: "
        f"{paths[0].name} {quote(owners[0].prompt, 60)} to {paths[-1].name} "
        f"{quote(owners[-1].prompt, 60)}"
    )
    return [
        Clip(path, owner.prompt, place, owner.seed, owner.image, owner.last_image)
        for path, place, owner in zip(paths, places, owners)
    ]


def _captioned(folder: Path) -> list[Clip]:
    """Return the videos of a folder that has their captions."""
    examples = read_examples([str(folder)], keep_fraction=1)
    places = {
        request: place for place, request in enumerate(dict.fromkeys(e.request for e in examples))
    }
    return [
        Clip(
            example.videos[0],
            example.request.prompt,
            places[example.request],
            None,
            example.request.image,
            example.request.last_image,
        )
        for example in examples
    ]


def _places_by_name(
    paths: Sequence[Path], requests: Sequence[Request], setting: str
) -> list[int] | None:
    """Return the number of the request whose prompt is the name of each video, perhaps cut or with
    a number before or behind it; None if no video has such a name.

    Raises ValueError if only some have one.
    """
    prompts = {" ".join(_words(request.prompt)): n for n, request in enumerate(requests)}
    if len(prompts) < len(requests):  # names do not say which row of equal prompts it is
        return None
    places = [_place_of(_words(path.stem), prompts) for path in paths]
    unnamed = [path for path, place in zip(paths, places) if place is None]
    if len(unnamed) == len(paths):
        return None
    if unnamed:
        raise ValueError(
            f"the names of some videos in {unnamed[0].parent} are prompts of {setting}, but "
            f"that of {quote(unnamed[0].name)} is none; rename it, or add its prompt"
        )
    return places


def _place_of(words: list[str], prompts: dict[str, int]) -> int | None:
    first = int(bool(words) and words[0].isdigit())
    last = len(words) - int(bool(words) and words[-1].isdigit())
    for named in (words, words[:last], words[first:], words[first:last]):
        name = " ".join(named)
        if name in prompts:
            return prompts[name]
        longer = [place for prompt, place in prompts.items() if prompt.startswith(name)]
        if len(name) >= CUT_NAME and len(longer) == 1:
            return longer[0]
    return None


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _by_row(paths: list[Path], num_rows: int) -> list[Path]:
    """Return the videos row by row, if one of the numbers in their names is that of the row: it has
    one value for each row, equally often. Otherwise they stay in order.
    """
    numbers = [[int(number) for number in re.findall(r"\d+", path.stem)] for path in paths]
    each = len(paths) // num_rows
    for place in range(min(map(len, numbers))):
        counts = Counter(found[place] for found in numbers)
        if len(counts) == num_rows and set(counts.values()) == {each}:
            order = sorted(range(len(paths)), key=lambda number: numbers[number][place])
            return [paths[number] for number in order]
    return paths


def write_videos_csv(
    path: Path, clips: list[Clip], column: str, values: Sequence[float | str | None]
) -> None:
    """Write the CSV file of videos that objective sft reads, with a column `score` or `keep`; videos
    whose value is None are left out. Paths are relative to the folder of the CSV.
    """
    rows = []
    for clip, value in zip(clips, values, strict=True):
        if value is None:
            continue
        video = os.path.relpath(clip.path, path.parent)
        images = [
            os.path.abspath(image) if image else "" for image in (clip.image, clip.last_image)
        ]
        rows.append([clip.prompt, video, *images, value])
    columns = [*COLUMNS, "ref_image_path", "ref_last_image_path", column]
    write_text(path, csv_text(columns, rows))


def read_clips(
    clips: list[Clip], rates: Sequence[float], height: int, width: int
) -> Iterator[dict[int, Tensor]]:
    """Yield the videos in order in parts of one frame rate, by number; those enlarged for mp4 are
    reduced to ``height`` x ``width``.
    """
    part: dict[int, Tensor] = {}
    num_bytes = 0
    for number, clip in enumerate(clips):
        part[number] = at_original_size(read_video(clip.path)[0], height, width)
        num_bytes += part[number].nbytes
        is_last = number == len(clips) - 1
        if is_last or num_bytes >= parts.PART_BYTES or rates[number + 1] != rates[number]:
            yield part
            part = {}
            num_bytes = 0


def _recorded(folder: Path) -> list[Clip]:
    """Return the videos listed in the scores.json of a run, or none if there is no such file."""
    path = folder / SCORES_FILE
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(entries, dict):  # of scripts.evaluate
            return []
        clips = []
        for entry in entries:
            if entry["file"]:
                clips.append(
                    Clip(folder / entry["file"], entry["prompt"], entry["group"], entry.get("seed"))
                )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must be a list of videos with file, prompt and group: {error!r}"
        ) from error
    return clips


def _check_common_settings(paths: list[Path], records: list[dict[str, Any]]) -> None:
    """Raise ValueError if the videos are of calls with different policies or settings."""
    for path, record in zip(paths, records):
        for name in COMMON_SETTINGS:
            first = records[0].get(name)
            value = record.get(name)
            if value != first:
                raise ValueError(
                    f"the videos in {path.parent} must be of one policy with the same settings: "
                    f"{name} is {quote(first)} for {paths[0].name} and {quote(value)} for "
                    f"{path.name}; move the videos of other calls of generate.py to another folder"
                )
