"""Videos of the prompts of a public benchmark, under the names that its official tool reads.

    <out>/<policy>/made/<seed>.mp4, .json  videos as generate.py writes them
    <out>/<policy>/videos/...              links to them by official name, and no other file

The official tools take the suffix of the first file in a folder as the suffix of all videos.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import generator
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.files.files import make_folder
from hyvideo.generation.generator import Generator
from hyvideo.generation.settings import GenerationSettings
from hyvideo.generation.videos import Video
from hyvideo.loading.model_setup import choose_device
from hyvideo.settings import processes
from hyvideo.settings.config import Config
from studies.figures.named_policies import Policies


@dataclass(frozen=True)
class Layout:
    """How the official tool of a benchmark names its videos."""

    videos: int  # per prompt
    others: dict[str, int]  # videos per prompt of single dimensions
    has_folders: bool = False  # the videos of each dimension are in a folder of their own
    name_length: int | None = None  # characters of the prompt in a name; None: all


LAYOUTS = {
    "vbench": Layout(videos=5, others={"temporal_flickering": 25}),
    "vbench2": Layout(videos=3, others={"Diversity": 20}, has_folders=True, name_length=180),
}
Clips = dict[tuple[int, str], list[str]]  # official names by number and prompt


def list_clips(
    layout: Layout, prompts: Path, *, dimensions: Sequence[str], num_videos: int | None
) -> Clips:
    """Return the official names of the videos of a list of prompts, first number 0 of all prompts.

    A prompt in several dimensions has one video with several names. Without ``dimensions``, all
    count; without ``num_videos``, each prompt has the official number of videos.
    """
    clips: Clips = {}
    for row in json.loads(prompts.read_text(encoding="utf-8")):
        prompt = row["prompt_en"]
        for dimension in row["dimension"]:
            if dimensions and dimension not in dimensions:
                continue
            for number in range(num_videos or layout.others.get(dimension, layout.videos)):
                name = f"{prompt[: layout.name_length]}-{number}.mp4"
                if layout.has_folders:
                    name = f"{dimension}/{name}"
                names = clips.setdefault((number, prompt), [])
                if name not in names:
                    names.append(name)
    return dict(sorted(clips.items(), key=lambda clip: clip[0][0]))


def make_videos(
    config: Config, policies: Policies, clips: Clips, rewritten: Mapping[str, str], out: Path
) -> None:
    """Make the videos of each policy and link their official names; the processes of torchrun share
    the videos.

    All policies have the same seeds, which depend on validation_seed, prompt and number alone.
    ``rewritten`` has the prompts to sample in place of the official ones. Raises ValueError as
    `Generator` does, before the first video is made.
    """
    generators = []
    links: dict[Path, Path] = {}  # videos by official path
    for policy, (source, sampling) in policies.items():
        _, height, width = sampling.size
        videos = []
        for (number, prompt), names in clips.items():
            seed = generator(config.validation.validation_seed, "benchmark", prompt, number)
            request = Request(prompt, seed=int(seed.integers(2**48)))
            made = out / policy / "made" / f"{request.seed:012x}.mp4"
            if prompt in rewritten:
                request = Request(rewritten[prompt], seed=request.seed, original_prompt=prompt)
            videos.append(Video(request, height, width, number, made))
            links |= {out / policy / "videos" / name: made for name in names}
        settings = GenerationSettings(
            config, sampling, source, seed=0, sp_size=config.distributed.sp_size
        )
        generators.append(Generator(settings, videos))
    device = choose_device(config.model.device, processes.local_rank())
    mesh = ranks.start(1, device, timeout=ranks.UNEVEN_WORK_TIMEOUT)
    for each in generators:
        each.make()
    barrier(mesh)
    if mesh.is_main:
        for link, made in links.items():
            make_folder(link.parent)
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(made, link.parent))
    ranks.stop()
