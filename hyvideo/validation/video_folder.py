"""Folders of mp4 files with their prompts: written by generate.py or a run, or in the order of a
prompts CSV.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hyvideo.data.csv_files import csv_text
from hyvideo.data.examples import COLUMNS
from hyvideo.data.files import folder_problem, read_json
from hyvideo.data.prompts import Request
from hyvideo.data.text import quote
from hyvideo.data.videos import at_original_size, read_header, read_video
from hyvideo.records.run_files import write_text
from hyvideo.validation import parts

SCORES_FILE = "scores.json"
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


def find_clips(folder: Path, requests: list[Request]) -> list[Clip]:
    """List the mp4 files of a folder with their prompts, from a run's scores.json or from JSON
    files beside them.

    Without either, the files belong to ``requests`` in order, equally many to each. Raises
    ValueError for unknown prompts, for a corrupted scores.json, and for videos of several policies
    or settings.
    """
    paths = sorted(folder.glob("*.mp4"))
    if not paths:
        problem = folder_problem(folder) or "it contains no mp4 file"
        raise ValueError(
            f"--videos must be a folder with mp4 files, got {quote(folder)}: {problem}"
        )
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
            clips.append(Clip(path, prompt, places[prompt], seed, record.get("image")))
        return clips
    if not requests or len(paths) % len(requests):
        raise ValueError(
            "the number of videos without JSON files must be a multiple of the rows of "
            f"valid_video_csv, because videos of a row follow one another, got {len(paths)} videos "
            f"in {folder} and {len(requests)} rows; add the missing videos, or the JSON files that "
            "name their prompts"
        )
    each = len(paths) // len(requests)
    owners = [requests[i // each] for i in range(len(paths))]
    return [
        Clip(path, owner.prompt, i // each, owner.seed, owner.image)
        for i, (path, owner) in enumerate(zip(paths, owners))
    ]


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
        image = os.path.abspath(clip.image) if clip.image else ""
        rows.append([clip.prompt, video, image, value])
    write_text(path, csv_text([*COLUMNS, "ref_image_path", column], rows))


def common_frame_rate(clips: list[Clip]) -> float:
    """Return the frame rate of the videos.

    Raises ValueError if they differ or a file is not a video.
    """
    rates = sorted({read_header(clip.path).fps for clip in clips})
    if len(rates) > 1:
        raise ValueError(
            "all videos must have the same frame rate, got "
            f"{', '.join(f'{rate:g}' for rate in rates)}"
        )
    return rates[0]


def read_clips(clips: list[Clip], height: int, width: int) -> Iterator[dict[int, Tensor]]:
    """Yield the videos in order in parts, by number; those enlarged for mp4 are reduced to
    ``height`` x ``width``.
    """
    part: dict[int, Tensor] = {}
    num_bytes = 0
    for number, clip in enumerate(clips):
        part[number] = at_original_size(read_video(clip.path)[0], height, width)
        num_bytes += part[number].nbytes
        if num_bytes >= parts.PART_BYTES or number == len(clips) - 1:
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
