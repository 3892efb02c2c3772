"""A blind preference study: pairs of videos for each rater, in files that do not reveal the
method.
"""

import itertools
import json
import math
import os
import secrets
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np

from hyvideo.data.examples import LATENTS_SUFFIX
from hyvideo.data.prompts import Request
from hyvideo.data.video_files import is_as_written
from hyvideo.data.videos import read_video, write_video
from hyvideo.files.files import publish, remove_partial
from hyvideo.files.text import quote
from hyvideo.ratings.rating import KEY, SIDES, STUDY, VIDEOS
from hyvideo.records.run_files import write_json
from hyvideo.validation.video_folder import Clip, find_clips

# Videos of a method, by prompt and number among the prompt's videos.
Clips = dict[tuple[str, int], Clip]

DATE = 946_684_800  # modification time of every file: 1 January 2000
# of a rater, if there are enough videos
DEFAULT_PAIRS = 20


def design(
    num_methods: int, num_units: int, *, raters: int, pairs: int, seed: int = 0
) -> list[list[tuple[int, int, int]]]:
    """Return each rater's pairs: unit, and methods of the first and second video.

    Combinations of method pairs and units (videos of common prompts) are arranged cyclically; each
    rater gets the next slice. In a slice, the counts of method pairs differ by at most one, those
    of units by at most two. For each rater, the counts of the earlier method on the two sides
    differ by at most one. Raises ValueError for impossible sizes.
    """
    versus = list(itertools.combinations(range(num_methods), 2))
    num_combinations = len(versus) * num_units
    period = math.lcm(len(versus), num_units)
    bounds = {"pairs": (1, pairs, num_combinations), "raters": (1, raters, 9999)}
    for name, (least, given, most) in bounds.items():
        if not least <= given <= most:
            what = f"{num_methods} methods with {num_units} videos of common prompts"
            raise ValueError(f"--{name} must be from {least} to {most} for {what}, got {given}")
    random = np.random.default_rng(seed)
    designed = []
    units = random.permutation(num_units).tolist()
    for rater in range(raters):
        screens = []
        sides = (random.permutation(pairs) + rater) % 2
        for place, side in zip(
            (random.permutation(pairs) + rater * pairs) % num_combinations, sides
        ):
            unit = units[(place + place // period) % num_units]
            methods = versus[place % len(versus)]
            screens.append((unit, methods[side], methods[1 - side]))
        designed.append(screens)
    return designed


def default_pairs(num_methods: int, num_units: int) -> int:
    """Return the number of pairs of a rater: as many as possible, up to 20.

    ``num_units`` are videos of common prompts.
    """
    return min(DEFAULT_PAIRS, math.comb(num_methods, 2) * num_units)


def clips_of(folder: Path, requests: list[Request]) -> Clips:
    """Return the videos in a folder."""
    places = defaultdict(itertools.count)
    return {(clip.prompt, next(places[clip.prompt])): clip for clip in find_clips(folder, requests)}


def two_sides(videos: list[Clip]) -> dict[str, Clips]:
    """Return videos as two methods: of each prompt and given frames, the first and
    second video, the third and fourth, and so on are compared.

    Raises ValueError if no prompt has two videos.
    """
    by_prompt = defaultdict(list)
    for clip in videos:
        by_prompt[clip.prompt, clip.image, clip.last_image].append(clip)
    places = defaultdict(itertools.count)
    sides: dict[str, Clips] = {"even": {}, "odd": {}}
    for (prompt, *_), clips in by_prompt.items():
        for even, odd in zip(clips[::2], clips[1::2]):
            unit = (prompt, next(places[prompt]))
            sides["even"][unit] = even
            sides["odd"][unit] = odd
    if not sides["even"]:
        raise ValueError(
            f"pairs need two videos of a prompt, got one of each, such as {quote(videos[0].path)}; "
            "sample with --num_videos 2, or rate single videos with --keep true"
        )
    return sides


def make_study(
    out: Path,
    methods: dict[str, Clips],
    *,
    questions: dict[str, str] | None = None,
    raters: int,
    pairs: int | None = None,
    seed: int | None = None,
) -> int:
    """Write a study of the videos of ``methods`` and return the number of pairs of a rater.

    Without ``pairs``, see `default_pairs`. Methods are compared on the videos that all of them
    have. Videos get random names, and the key is never served. Videos of this project are copied,
    with their latents; if others are among them, all are compressed again. Without ``questions``,
    those of questions.json are asked.
    """
    clips = list(methods.values())
    units = [unit for unit in clips[0] if all(unit in others for others in clips)]
    if pairs is None:
        pairs = default_pairs(len(methods), len(units))
    if seed is None:
        seed = secrets.randbits(64)
    designed = design(len(methods), len(units), raters=raters, pairs=pairs, seed=seed)
    served = {}
    key = {}
    files: dict[Path, str] = {}  # names of the copies, by source
    for number, screens in enumerate(designed, start=1):
        shown = {secrets.token_hex(10): screen for screen in screens}
        for pair, (unit, *compared) in shown.items():
            chosen = [clips[method][units[unit]] for method in compared]
            sources = [clip.path for clip in chosen]
            for source in sources:
                files.setdefault(source, f"{secrets.token_hex(10)}.mp4")
            shown[pair] = {"prompt": units[unit][0]} | {
                side: f"{VIDEOS}/{files[source]}" for side, source in zip(SIDES, sources)
            }
            secret = {
                "unit": unit,
                "methods": compared,
                "sources": [str(s.resolve()) for s in sources],
            }
            if chosen[0].image:
                secret["ref_image_path"] = os.path.abspath(chosen[0].image)
            if chosen[0].last_image:
                secret["ref_last_image_path"] = os.path.abspath(chosen[0].last_image)
            key[pair] = shown[pair] | secret
        served[secrets.token_urlsafe(16)] = {"name": f"r{number:02d}", "pairs": shown}
    if questions is None:
        questions = json.loads(Path(__file__).with_name("questions.json").read_text())
    # Files that could reveal the method by their format or metadata are all written again, so that
    # none differs.
    are_copied = all(is_as_written(each[unit].path) for each in clips for unit in units)
    remove_partial(out, f"{VIDEOS}.")  # of a killed `make`
    with publish(out / VIDEOS, is_folder=True) as videos:
        _write_copies(videos, files, are_copied)
        write_json(out / KEY, {"methods": list(methods), "pairs": key})
        write_json(out / STUDY, {"questions": questions, "raters": served})
    return pairs


def _write_copies(folder: Path, files: dict[Path, str], are_copied: bool) -> None:
    """Write the videos under their new names, as they are or compressed again, all with one date."""
    for source, name in files.items():
        if are_copied:
            _copy(source, folder / name)
        else:
            write_video(folder / name, *read_video(source))
    for path in folder.iterdir():
        os.utime(path, (DATE, DATE))


def _copy(source: Path, copy: Path) -> None:
    """Copy a video and the latents beside it, if there are any. No page serves these."""
    shutil.copyfile(source, copy)
    latents = source.with_suffix(LATENTS_SUFFIX)
    if latents.is_file():
        shutil.copyfile(latents, copy.with_suffix(LATENTS_SUFFIX))
