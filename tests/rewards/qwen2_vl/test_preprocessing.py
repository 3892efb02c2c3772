"""Tests of frame sampling, sizes and patches against the original."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from hyvideo.data.videos import read_video
from hyvideo.rewards.qwen2_vl.preprocessing import (
    FACTOR,
    MIN_PIXELS,
    frame_indices,
    patches,
    resize,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "videoalign"
golden = json.loads((GOLDEN / "golden.json").read_text())
MAX_PIXELS = 200704


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def size_of(height, width):
    """Return the size to which a video of this size is resized."""
    frames = torch.zeros(1, 3, height, width, dtype=torch.uint8, device="meta")
    return tuple(resize(frames, max_pixels=MAX_PIXELS).shape[-2:])


@pytest.mark.parametrize("total, fps, count, indices", golden["tables"]["smart_nframes"])
def test_sampled_frames_match_the_original(total, fps, count, indices):
    chosen = frame_indices(total, fps)
    assert len(chosen) == count
    assert indices is None or chosen == indices


@pytest.mark.parametrize("height, width, to_height, to_width", golden["tables"]["smart_resize"])
def test_sizes_match_the_original(height, width, to_height, to_width):
    assert size_of(height, width) == (to_height, to_width)


def test_sizes_are_multiples_of_28_with_bounded_area():
    rng = random.Random(0)
    for _ in range(100):
        size = rng.randint(28, 2000), rng.randint(28, 2000)
        if max(size) / min(size) > 20:
            continue
        height, width = size_of(*size)
        assert height % FACTOR == width % FACTOR == 0
        assert height * width >= MIN_PIXELS
        assert height * width <= MAX_PIXELS or size[0] * size[1] < MIN_PIXELS


@pytest.mark.parametrize("clip", range(3))
def test_frames_and_pixels_of_the_golden_videos_are_bit_equal(clip):
    expected = golden["meta"][str(clip)]
    video, fps = read_video(GOLDEN / "videos" / golden["videos"][clip])
    assert fps == expected["fps"] and len(video) == expected["total_frames"]
    indices = frame_indices(len(video), fps)
    assert indices == expected["idx"]
    frames = np.load(GOLDEN / "intermediates.npz")[f"{clip}_frames_uint8_THWC"]
    assert torch.equal(video[indices], torch.from_numpy(frames).permute(0, 3, 1, 2))
    small = resize(video[indices], max_pixels=MAX_PIXELS)
    assert sha(small) == expected["resized_sha256_uint8"]
    values, grid = patches(small)
    assert list(values.shape) == expected["pixel_values_shape"]
    assert sha(values) == expected["pixel_values_sha256"]
    assert grid[0] * grid[1] * grid[2] == len(values)


@pytest.mark.parametrize(
    "total, fps, count", [(25, 10.0, 4), (35, 10.0, 8), (30, 10.0, 6), (60, 24.0, 4), (24, 10.0, 4)]
)
def test_half_a_pair_of_frames_is_rounded_to_an_even_number_of_pairs(total, fps, count):
    """2.5 pairs are two, 3.5 pairs are four: Python's rounding, as in the original."""
    assert len(frame_indices(total, fps)) == count
