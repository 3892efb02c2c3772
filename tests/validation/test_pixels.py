"""Properties of pixels: closed forms, and the changes that each of them detects."""

import pytest
import torch
import torch.nn.functional as F

from hyvideo.data.randomness import normal
from hyvideo.validation.pixels import diversity, measure_video, thumbnail


def grey(level, frames=5, size=16):
    return torch.full((frames, 3, size, size), level, dtype=torch.uint8)


def textured(key, frames=9, size=64):
    """Return slightly smoothed color noise."""
    noise = F.avg_pool2d(normal((frames, 3, size + 2, size + 2), "texture", key), 3, stride=1)
    return (128 + 120 * noise).clamp(1, 254).to(torch.uint8)


def moving_square(speed, frames=9, size=32):
    video = grey(64, frames, size)
    for i in range(frames):
        video[i, :, 8:16, i * speed : i * speed + 8] = 192
    return video


def test_a_constant_gray_video_is_frozen():
    found = measure_video(grey(51))
    assert found.exposure == pytest.approx(0.2)
    assert (found.motion, found.frozen, found.saturation, found.clipped, found.sharpness) == (
        0,
        1,
        0,
        0,
        0,
    )


def test_motion_of_a_square_is_its_changed_area():
    found = measure_video(moving_square(2))
    changed = 2 * 2 * 8 / 32**2  # two columns are covered, two uncovered
    assert found.motion == pytest.approx(changed * 128 / 255, rel=1e-5) and found.frozen == 0
    assert measure_video(moving_square(1)).motion == pytest.approx(found.motion / 2, rel=1e-5)


def test_a_video_that_stops_halfway_is_half_frozen():
    video = moving_square(2)
    video[5:] = video[4]
    assert measure_video(video).frozen == 0.5


def test_clipping_and_saturation_of_pure_colors():
    video = grey(100)
    video[:, 0, :8] = 255  # the upper half turns red
    found = measure_video(video)
    assert found.clipped == 0.5 and found.saturation == pytest.approx(0.5 * 155 / 255)


def test_blur_lowers_only_sharpness_and_a_grid_raises_it():
    video = textured("blur")
    blurred = F.avg_pool2d(video.float(), 3, stride=1, padding=1, count_include_pad=False).to(
        torch.uint8
    )
    grid = video.clone()
    grid[..., ::4, :] = 20
    before, after = measure_video(video), measure_video(blurred)
    assert after.sharpness < 0.5 * before.sharpness
    assert after.exposure == pytest.approx(before.exposure, abs=0.01)
    assert measure_video(grid).sharpness > 1.3 * before.sharpness


def test_sharpness_of_white_noise_is_1_at_any_contrast():
    for contrast in (10, 60):
        noise = (
            (128 + contrast * normal((4, 1, 64, 64), "white").clamp(-2, 2))
            .to(torch.uint8)
            .expand(4, 3, 64, 64)
        )
        assert measure_video(noise).sharpness == pytest.approx(1, rel=0.05)


def test_metrics_do_not_depend_on_size_and_length():
    """A subset of frames is measured, and motion at low resolution."""
    small = moving_square(2, frames=13)
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    assert measure_video(large).motion == pytest.approx(measure_video(small).motion, rel=1e-5)
    long = torch.cat([textured("long", frames=40), textured("more", frames=41)])
    assert measure_video(long).exposure == pytest.approx(long.float().mean().item() / 255, abs=0.02)


def test_diversity_is_the_mean_distance_within_a_prompt():
    videos = [grey(0), grey(51), grey(102), grey(255)]
    pictures = torch.stack([thumbnail(video) for video in videos])
    assert diversity(pictures, ["a", "a", "a", "b"]).tolist() == pytest.approx(
        [(0.2 + 0.2 + 0.4) / 3]
    )
    assert diversity(pictures, ["a", "b", "a", "b"]).tolist() == pytest.approx([0.4, 0.8])
    assert diversity(pictures, list("abcd")).tolist() == []
