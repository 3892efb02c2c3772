"""A folder of mp4 files as videos of prompts: of generate.py, of a run's records, or in the order of a prompts CSV."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.data.outside import folder_problem, parse_json, shown
from hyvideo.data.prompts import Request
from hyvideo.data.videos import mp4_factor, read_video


@dataclass(frozen=True)
class Clip:
    """A video file and the prompt that it was made for."""

    path: Path
    prompt: str
    group: int  # place of the prompt among the prompts


def find_clips(folder: Path, requests: list[Request]) -> list[Clip]:
    """The mp4 files of a folder by name, with the prompts of the JSON files beside them or of a run's scores.json.

    Without either the prompts are ``requests`` in order, each for as many files in a row as all have. Raises ValueError
    where there are no videos, or where it cannot be said which prompt a file belongs to.
    """
    paths = sorted(folder.glob("*.mp4"))
    if not paths:
        lacking = folder_problem(folder) or "it has none"
        raise ValueError(f"--videos must be a folder with mp4 files, got {shown(folder)}: {lacking}")
    if recorded := _recorded(folder):
        return recorded
    with_settings = [path for path in paths if path.with_suffix(".json").is_file()]
    if len(with_settings) == len(paths):
        prompts = [_prompt_of(path.with_suffix(".json")) for path in paths]
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        return [Clip(path, prompt, places[prompt]) for path, prompt in zip(paths, prompts)]
    if with_settings:
        raise ValueError(
            f"{len(with_settings)} of {len(paths)} videos in {folder} have a JSON file with their prompt; give one to "
            "all or to none"
        )
    if not requests or len(paths) % len(requests):
        raise ValueError(
            f"without JSON files beside them the {len(paths)} videos in {folder} must be as many as the rows of "
            f"valid_video_csv, or a multiple; it has {len(requests)}"
        )
    each = len(paths) // len(requests)
    return [Clip(path, requests[i // each].prompt, i // each) for i, path in enumerate(paths)]


def read_clips(clips: list[Clip], height: int, width: int) -> tuple[list[Tensor], float]:
    """Frames of the clips, enlarged ones at their own size ``height`` x ``width``, and the frame rate of all."""
    read = [read_video(clip.path) for clip in clips]
    rates = sorted({fps for _, fps in read})
    if len(rates) > 1:
        raise ValueError(f"the videos must have one frame rate, got {', '.join(f'{rate:g}' for rate in rates)}")
    return [_in_own_size(video, height, width) for video, _ in read], rates[0]


def _in_own_size(video: Tensor, height: int, width: int) -> Tensor:
    factor = mp4_factor(height, width)
    if factor == 1 or tuple(video.shape[-2:]) != (height * factor, width * factor):
        return video
    blocks = video.float().unflatten(-1, (width, factor)).unflatten(-3, (height, factor))
    return blocks.mean((-3, -1)).round().to(torch.uint8)


def _recorded(folder: Path) -> list[Clip]:
    """Videos that a run kept, by its record of them; none where the folder is not a run's."""
    path = folder / "scores.json"
    entries = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else []
    if not isinstance(entries, list):
        return []
    return [Clip(folder / e["file"], e["prompt"], e["group"]) for e in entries if e["file"]]


def _prompt_of(path: Path) -> str:
    content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("prompt"), str):
        raise ValueError(f"{path} must hold an object with a prompt")
    return content["prompt"]
