"""Measures of pixels: closed forms, and what each of them answers to."""

import math

import pytest
import torch
import torch.nn.functional as F

from hyvideo.data.randomness import normal
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.reward_hacking.held_out_metrics import (
    NAMES,
    diversity,
    measure_all,
    measure_video,
    thumbnail,
)
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward


def grey(level, frames=5, size=16):
    return torch.full((frames, 3, size, size), level, dtype=torch.uint8)


def textured(key, frames=9, size=64):
    """Coloured noise, smoothed a little."""
    noise = F.avg_pool2d(normal((frames, 3, size + 2, size + 2), "texture", key), 3, stride=1)
    return (128 + 120 * noise).clamp(1, 254).to(torch.uint8)


def moving_square(speed, frames=9, size=32):
    video = grey(64, frames, size)
    for i in range(frames):
        video[i, :, 8:16, i * speed : i * speed + 8] = 192
    return video


def test_a_constant_grey_stands_still():
    shown = measure_video(grey(51))
    assert shown.exposure == pytest.approx(0.2)
    assert (shown.motion, shown.frozen, shown.saturation, shown.clipped, shown.sharpness) == (0, 1, 0, 0, 0)


def test_the_motion_of_a_square_is_what_it_covers_and_uncovers():
    shown = measure_video(moving_square(2))
    changed = 2 * 2 * 8 / 32**2  # two columns come, two go
    assert shown.motion == pytest.approx(changed * 128 / 255, rel=1e-5) and shown.frozen == 0
    assert measure_video(moving_square(1)).motion == pytest.approx(shown.motion / 2, rel=1e-5)


def test_half_a_video_that_stops_is_half_frozen():
    video = moving_square(2)
    video[5:] = video[4]
    assert measure_video(video).frozen == 0.5


def test_clipping_and_chroma_of_pure_colours():
    video = grey(100)
    video[:, 0, :8] = 255  # the upper half turns red
    shown = measure_video(video)
    assert shown.clipped == 0.5 and shown.saturation == pytest.approx(0.5 * 155 / 255)


def test_blurring_lowers_sharpness_alone_and_a_grid_raises_it():
    video = textured("blur")
    blurred = F.avg_pool2d(video.float(), 3, stride=1, padding=1, count_include_pad=False).to(torch.uint8)
    grid = video.clone()
    grid[..., ::4, :] = 20
    before, after = measure_video(video), measure_video(blurred)
    assert after.sharpness < 0.5 * before.sharpness
    assert after.exposure == pytest.approx(before.exposure, abs=0.01)
    assert measure_video(grid).sharpness > 1.3 * before.sharpness


def test_sharpness_of_white_noise_is_1_whatever_its_contrast():
    for contrast in (10, 60):
        noise = (128 + contrast * normal((4, 1, 64, 64), "white").clamp(-2, 2)).to(torch.uint8).expand(4, 3, 64, 64)
        assert measure_video(noise).sharpness == pytest.approx(1, rel=0.05)


def test_brightening_raises_exposure():
    video = textured("bright")
    assert measure_video(video // 2 + 127).exposure > measure_video(video).exposure + 0.2


def test_a_large_video_measures_as_its_small_parts_do():
    """Some frames are looked at, and motion is seen at low resolution."""
    small = moving_square(2, frames=13)
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert measure_video(large).motion == pytest.approx(measure_video(small).motion, rel=1e-5)
    long = torch.cat([textured("long", frames=40), textured("more", frames=41)])
    assert measure_video(long).exposure == pytest.approx(long.float().mean().item() / 255, abs=0.02)


def test_a_single_frame_and_a_single_pixel_are_videos_too():
    shown = measure_video(grey(51, frames=1, size=1))
    assert (shown.motion, shown.frozen, shown.sharpness) == (0, 0, 0)
    assert thumbnail(grey(51, frames=1, size=1)).unique().numel() == 1


def test_diversity_is_the_mean_distance_within_a_prompt():
    videos = [grey(0), grey(51), grey(102), grey(255)]
    pictures = torch.stack([thumbnail(video) for video in videos])
    assert diversity(pictures, ["a", "a", "a", "b"]).tolist() == pytest.approx([(0.2 + 0.2 + 0.4) / 3])
    assert diversity(pictures, ["a", "b", "a", "b"]).tolist() == pytest.approx([0.4, 0.8])
    assert diversity(pictures, list("abcd")).tolist() == []
    pictures[1] = float("nan")
    assert diversity(pictures, ["a", "a", "a", "b"]).tolist() == pytest.approx([0.4])


def measured(videos, prompts, rewards=None):
    scored = rewards or [Reward(1.0, {})] * len(videos)
    scorer = AsyncScorer({}, {"VQ": 1.0})
    rows = range(len(videos))
    return measure_all(dict(zip(rows, videos)), dict(zip(rows, scored)), prompts, prompts, scorer, Mesh(0, 1, 1))


def test_equal_videos_have_no_diversity_and_means_are_over_the_videos():
    same, spreads = measured([textured("x")] * 3, ["a"] * 3)
    assert same["held_out/diversity"] == 0 and spreads["held_out/exposure"] == (0, 3)
    two, spreads = measured([grey(51), grey(102), None], ["a", "b", "b"])
    assert two["held_out/exposure"] == pytest.approx(0.3) and two.keys() == {f"held_out/{name}" for name in NAMES}
    assert spreads["held_out/exposure"] == (pytest.approx(0.1), 2)


def test_what_is_scored_without_weight_is_measured_too():
    rewards = [Reward(1.0, {"VQ": 1.0, "MQ": value, "Overall": 9.0}) for value in (2.0, 4.0, math.nan)]
    means, spreads = measured([grey(51)] * 3, ["a"] * 3, rewards)
    assert means["MQ"] == 3 and spreads["MQ"] == (1, 2) and not {"VQ", "Overall"} & means.keys()
