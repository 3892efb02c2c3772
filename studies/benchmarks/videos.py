"""Videos of a benchmark's prompts, in the layout of its official tool.

    <out>/<policy>/made/<seed>.mp4, .json  videos as generate.py writes them
    <out>/<policy>/videos/...              links to them by official name, and no other file

A video without its JSON file is not complete. The official tools take the suffix of the first file
in the folder as the suffix of all videos.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.files import make_folder, read_json, read_text
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import generator
from hyvideo.data.text import quote
from hyvideo.generation.generation import Source
from hyvideo.generation.generator import GenerationSettings, Generator
from hyvideo.generation.video_sampler import Video
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling
from studies.benchmarks.suites import Suite, suite_of

MAX_NAME = 255  # bytes of a file name
Row = tuple[str, list[str]]  # a prompt and its dimensions


@dataclass(frozen=True)
class BenchmarkClip:
    """A video to make; ``files`` are its official names."""

    request: Request
    number: int  # among the videos of the prompt
    files: list[str]


def read_list(path: Path, only: list[str], *, is_official: bool) -> tuple[Suite, list[Row]]:
    """Read the prompts of an official list, of the dimensions ``only`` (all).

    Raises ValueError for another form and, if ``is_official``, for other numbers of prompts than
    published.
    """
    try:
        content = json.loads(read_text(path))
        rows = [(row["prompt_en"], list(row["dimension"])) for row in content]
        found = {name for _, names in rows for name in names}
        suite = suite_of(found, path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must be a list such as VBench_full_info.json: [{{prompt_en, dimension: "
            f"[...]}}, ...] ({error})"
        ) from error
    suite_of(found | set(only), "--dimensions")
    chosen = {
        name: each.prompts for name, each in suite.dimensions.items() if not only or name in only
    }
    counts = Counter(name for _, names in rows for name in names)
    wrong = [
        f"{name} {counts[name]} instead of {number}"
        for name, number in chosen.items()
        if counts[name] != number
    ]
    if is_official and wrong:
        raise ValueError(
            f"{path} must have the published numbers of prompts, got {', '.join(wrong)}; choose "
            "complete --dimensions, or set --any_list true for scores that cannot be compared with "
            "published ones"
        )
    kept = [(prompt, [name for name in names if name in chosen]) for prompt, names in rows]
    return suite, [(prompt, names) for prompt, names in kept if names]


def list_clips(
    suite: Suite, rows: list[Row], augmented: dict[str, str], *, seed: int, num_videos=None
) -> list[BenchmarkClip]:
    """Return the videos of the prompts, first number 0 of all.

    A prompt in several dimensions is made once.

    A seed depends on ``seed``, prompt and number alone, so that policies and subsets of dimensions
    share videos. Raises ValueError for an official name that is too long for a file or that two
    prompts would have.
    """
    clips: dict[tuple[int, str], BenchmarkClip] = {}
    owners: dict[str, str] = {}  # prompt by official name
    for prompt, name in ((prompt, name) for prompt, names in rows for name in names):
        if augmented and prompt not in augmented:
            raise ValueError(
                "--augmented must have every prompt as original_prompt, got none for "
                f"{quote(prompt)}"
            )
        for number in range(num_videos or suite.dimensions[name].videos or suite.videos):
            own = int(generator(seed, "benchmark", prompt, number).integers(2**48))
            request = Request(prompt, seed=own)
            if augmented:
                request = Request(augmented[prompt], seed=own, original_prompt=prompt)
            clip = clips.setdefault((number, prompt), BenchmarkClip(request, number, []))
            file = f"{prompt[: suite.name_length]}-{number}.mp4"
            if suite.has_folders:
                file = f"{name}/{file}"
            if file not in clip.files:
                clip.files.append(file)
            size = len(os.fsencode(os.path.basename(file)))
            if size > MAX_NAME:
                raise ValueError(
                    f"the official name of a video must have at most {MAX_NAME} bytes, got {size} "
                    f"for the prompt {quote(prompt)}; shorten or remove the prompt"
                )
            if owners.setdefault(file, prompt) != prompt:
                raise ValueError(
                    f"two prompts have the official name {quote(file)}: {quote(owners[file])} and "
                    f"{quote(prompt)}; remove one of them"
                )
    return sorted(clips.values(), key=lambda clip: clip.number)


@dataclass(frozen=True)
class BenchmarkVideos:
    """Videos of one policy."""

    config: Config
    sampling: Sampling
    source: Source
    clips: list[BenchmarkClip]
    folder: Path

    def made(self, clip: BenchmarkClip) -> Path:
        return self.folder / "made" / f"{clip.request.seed:012x}.mp4"

    @property
    def settings(self) -> GenerationSettings:
        return GenerationSettings(
            self.config,
            self.sampling,
            self.source,
            seed=0,
            sp_size=self.config.distributed.sp_size,
        )

    def pending(self) -> list[Video]:
        """Return the videos that are not complete.

        Raises ValueError for one that was made with other settings.
        """
        _, *size = self.sampling.size
        pending = []
        for clip in self.clips:
            video = Video(clip.request, *size, clip.number, self.made(clip))
            if not (video.record.is_file() and video.path.is_file()):
                pending.append(video)
                continue
            old = read_json(video.record, "video")
            new = self.settings.record_of(video)
            changed = [
                f"{name} {quote(old.get(name))}, now {quote(value)}"
                for name, value in new.items()
                if old.get(name) != value
            ]
            if changed:
                raise ValueError(
                    f"{video.path} has other settings: {'; '.join(changed)}. Choose another "
                    "--output_dir"
                )
        return pending

    def make(self, videos: list[Video], *, only_checks: bool = False) -> None:
        """Generate the videos; the processes of torchrun share them.

        Raises ValueError as `Generator` does.
        """
        if not videos:
            return
        generator = Generator(self.settings, videos)
        if not only_checks:
            generator.make()

    def link(self) -> None:
        """Link the official names to the videos.

        Raises ValueError for a name that another file has.
        """
        for made, file in [(self.made(clip), file) for clip in self.clips for file in clip.files]:
            official = self.folder / "videos" / file
            make_folder(official.parent)
            target = os.path.relpath(made, official.parent)
            if not os.path.lexists(official):
                official.symlink_to(target)
            elif not official.is_symlink() or os.readlink(official) != target:
                raise ValueError(
                    f"{official} must be a link to {target}, but another file has this name; "
                    f"delete {self.folder / 'videos'}, or use a file system that distinguishes "
                    "upper and lower case"
                )
