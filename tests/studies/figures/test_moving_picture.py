"""Moving pictures: every frame of every video is at its place, in the right color and order."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from hyvideo.data.videos import write_video
from studies.figures.moving_picture import (
    GAP,
    LAST_FRAME_MS,
    MAX_FRAMES,
    SIDE,
    moving_picture,
    read_clip,
)


def clip(*levels, height=32, width=32):
    """A video with a gray frame of each level. Shape: uint8 (frames, 3, height, width)."""
    values = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None]
    return values.expand(-1, 3, height, width).contiguous()


def frames_of(path):
    """Frames and their durations in milliseconds."""
    with Image.open(path) as picture:
        found = []
        for frame in ImageSequence.Iterator(picture):
            pixels = np.asarray(frame.convert("RGB")).astype(int)
            found.append((pixels, frame.info["duration"]))
        assert picture.info["loop"] == 0
        return found


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_every_video_plays_at_its_row_and_column(tmp_path, kind):
    clips = {
        "base": [clip(0, 40, 80), clip(10, 50, 90)],
        "trained": [clip(120, 160, 200), clip(130, 170)],  # the shorter one waits at its end
    }
    path = tmp_path / f"picture.{kind}"
    moving_picture(path, [], clips, fps=8)
    frames = frames_of(path)
    assert [duration for _, duration in frames] == pytest.approx([125, 125, LAST_FRAME_MS], abs=10)
    step = SIDE + GAP
    for number, (pixels, _) in enumerate(frames):
        assert pixels.shape == (2 * SIDE + GAP, 2 * SIDE + GAP, 3)
        for column, videos in enumerate(clips.values()):
            for row, video in enumerate(videos):
                place = pixels[row * step + 8 : row * step + SIDE - 8]
                place = place[:, column * step + 8 : column * step + SIDE - 8]
                expected = video[min(number, len(video) - 1), 0, 0, 0].item()
                assert abs(place - expected).max() <= 3


def test_titles_and_prompts_stand_outside_the_videos(tmp_path):
    clips = {"base": [clip(255, 255)], "trained": [clip(255, 255)]}
    for name, prompts in (("with", ["a red circle moves up"]), ("without", [])):
        moving_picture(tmp_path / f"{name}.gif", prompts, clips, fps=8)
    (with_texts, _), *_ = frames_of(tmp_path / "with.gif")
    (alone, _), *_ = frames_of(tmp_path / "without.gif")
    height, width, _ = alone.shape
    assert (alone > 250).all() and (with_texts[-height:, -width:] > 250).all()
    assert (with_texts[:-height, -width:] < 100).any()  # titles
    assert (with_texts[-height:, :-width] < 100).any()  # prompts


def test_long_and_large_videos_are_shown_in_part(tmp_path):
    levels = [53 * number % 256 for number in range(2 * MAX_FRAMES - 1)]
    path = tmp_path / "picture.webp"
    moving_picture(path, [], {"base": [clip(*levels, height=256, width=512)]}, fps=24)
    frames = frames_of(path)
    assert len(frames) == MAX_FRAMES and frames[0][1] == pytest.approx(2000 / 24, abs=1)
    assert frames[0][0].shape == (SIDE, 2 * SIDE, 3)
    assert abs(frames[10][0] - levels[20]).max() <= 3


def test_files_of_small_videos_are_read_at_their_own_size(tmp_path):
    checkers = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    checkers[..., ::2] = 255
    write_video(tmp_path / "0000.mp4", checkers, 8)
    found = read_clip(tmp_path / "0000.mp4", 32, 32)
    assert found.shape == (2, 3, SIDE, SIDE)
    columns = found[0, 0, 0].reshape(32, -1).float()
    assert (columns.max(1).values - columns.min(1).values).max() == 0  # whole squares
    assert (columns[::2] > 200).all() and (columns[1::2] < 50).all()
