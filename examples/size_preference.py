"""Write 500 rated pairs of miniature videos, which docs/ratings.md#blind-preference-study uses.

    python -m examples.size_preference outputs/study

Simulated raters prefer the larger shape. `Area` is a scorer that measures the size of the shape.
"""

import argparse
from pathlib import Path

import torch.nn.functional as F

from examples.miniature_from_scratch.web_data import random_labels
from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8, write_video
from hyvideo.files.cli import exit_on_error
from hyvideo.files.tables import csv_text
from hyvideo.miniature import world
from hyvideo.rewards.rewards import Scorer


class Area(Scorer):
    """Scorer of the number of pixels that the shape covers, averaged over the frames."""

    dimensions = ("area",)

    def score(self, videos, prompts, *, fps):
        saturation = [(video.amax(1) - video.amin(1)).float() / 255 for video in videos]
        return [
            {"area": ((s - 0.2) / 0.35).clamp(0, 1).sum((1, 2)).mean().item()} for s in saturation
        ]


def shrunk(clip, factor):
    """Shrink the frames by ``factor`` and center them on the background."""
    side = clip.shape[-1]
    small = round(factor * clip.shape[-1])
    whole = clip[..., :1, :1].expand_as(clip).clone()
    start = (side - small) // 2
    middle = slice(start, start + small)
    whole[..., middle, middle] = (
        F.interpolate(clip.float(), (small, small), mode="area").round().byte()
    )
    return whole


def rated_pairs(count, seed, smallest=0.75):
    """Yield prompt, pair of videos shrunk to ``smallest`` or more of their size, and answer (tie
    below 4 pixels).
    """
    rng = generator(seed, "study")
    labels = random_labels(count, rng)
    sides = [to_uint8(world.render(labels, rng)).transpose(1, 2).contiguous() for _ in range(2)]
    for label, factors, *pair in zip(
        labels, generator(seed, "factors").uniform(smallest, 1, (count, 2)), *sides
    ):
        pair = [shrunk(clip, factor) for clip, factor in zip(pair, factors)]
        first, second = (scores["area"] for scores in Area().score(pair, [], fps=world.FPS))
        answer = "first" if first > second else "second"
        if abs(first - second) < 4:
            answer = "tie"
        yield world.caption(label), pair, answer


def write_study(folder, count, seed):
    """Write the mp4 files and pairs.csv."""
    folder.mkdir(parents=True)
    rows = []
    for number, (prompt, pair, answer) in enumerate(rated_pairs(count, seed)):
        names = [f"{number:03}_{side}.mp4" for side in "ab"]
        for name, clip in zip(names, pair):
            write_video(folder / name, clip, world.FPS)
        rows.append([prompt, *names, "SIZE", answer])
    columns = ["prompt", "first", "second", "dimension", "answer"]
    (folder / "pairs.csv").write_text(csv_text(columns, rows))


@exit_on_error("size_preference.py", OSError)
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    write_study(parser.parse_args().out, 500, seed=0)


if __name__ == "__main__":
    main()
