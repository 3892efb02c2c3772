"""The scorers on videos of the released lengths and sizes, with tiny models and the released
preprocessing.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyvideo.rewards.rewards import scorer_class
from tests.true_sizes.video_files import moving_blocks

ROOT = Path(__file__).resolve().parents[2]
# Frames, height and width; frames per second; frames that VideoAlign samples, at 2 per second.
SHAPES = {
    (81, 352, 624): (24, 6),
    (121, 480, 864): (24, 10),
    (121, 720, 1280): (24, 10),
    (81, 480, 832): (16, 10),
}
MAX_PIXELS = 200_704  # of a frame in the released VideoReward


@pytest.fixture(scope="module")
def videoalign(scorers):
    return scorer_class("videoalign")(scorers / "videoalign")


def test_videoalign_samples_and_resizes_released_sizes(videoalign):
    for (frames, height, width), (fps, sampled) in SHAPES.items():
        video = moving_blocks(1, height, width).expand(frames, -1, -1, -1)
        chosen = videoalign.sample_frames(video, fps)
        assert len(chosen) == sampled
        rows, columns = chosen.shape[-2:]
        assert rows % 28 == columns % 28 == 0
        assert 0.85 * MAX_PIXELS < rows * columns <= MAX_PIXELS
        assert columns / rows == pytest.approx(width / height, rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scorer, size",
    [
        ("videoalign", (121, 720, 1280)),
        ("clip", (121, 720, 1280)),
        ("hpsv3", (121, 720, 1280)),
    ],
)
def test_scores_are_finite_and_memory_does_not_grow_with_the_number_of_videos(
    scorers, scorer, size
):
    ended = subprocess.run(
        [
            sys.executable,
            "tests/true_sizes/peak_memory.py",
            scorer,
            scorers / scorer,
            *map(str, size),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(ended.stdout)
    print(
        f"\n{scorer} {size}: {found['peak_gib']:.2f} GiB, {found['growth_mib']:.0f} MiB more for "
        "24 videos than for 8"
    )
    (first, *others) = found["few"] + found["many"]
    assert all(math.isfinite(score) for score in first.values())
    for other in others:
        assert other == pytest.approx(first, rel=1e-2, abs=1e-3)
    assert found["growth_mib"] < 64
