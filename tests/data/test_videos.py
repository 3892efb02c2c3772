"""Tests of video files: pixels, frames and timing survive encoding and decoding, and writes are
atomic.
"""

import os
from pathlib import Path

import av
import pytest
import torch

from hyvideo.data.videos import (
    mp4_factor,
    read_video,
    to_uint8,
    write_video,
)

ROOT = Path(__file__).resolve().parents[2]


def moving_square(num_frames: int = 9, height: int = 32, width: int = 32) -> torch.Tensor:
    """Return a red square moving right over blue, whose hard color edges are sensitive to chroma
    subsampling.
    """
    video = torch.zeros(num_frames, 3, height, width, dtype=torch.uint8)
    video[:, 2] = 200
    for frame in range(num_frames):
        video[frame, 0, 11:20, 3 + frame : 12 + frame] = 230
        video[frame, 2, 11:20, 3 + frame : 12 + frame] = 20
    return video


def test_a_small_video_survives_the_round_trip(tmp_path):
    video = moving_square()
    write_video(tmp_path / "clip.mp4", video, fps=8)
    back, fps = read_video(tmp_path / "clip.mp4")
    assert back.dtype == torch.uint8 and back.shape == (9, 3, 256, 256)
    assert fps == 8.0
    small = back.float().unflatten(-2, (32, 8)).unflatten(-1, (32, 8)).mean(dim=(-3, -1))
    error = (small - video.float()).abs()
    assert error.mean() < 1
    assert error.max() < 25


def test_writing_and_reading_leave_no_threads(tmp_path):
    """A process forked later would wait for such a thread forever."""
    before = len(os.listdir("/proc/self/task"))
    write_video(tmp_path / "clip.mp4", moving_square(), fps=8)
    read_video(tmp_path / "clip.mp4")
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize("num_frames, fps", [(1, 29.97), (43, 29.97)])
def test_every_frame_of_any_length_is_kept_in_order_and_on_time(tmp_path, num_frames, fps):
    """The muxer changes the time base of the stream once it writes the header, within the first 43
    frames.
    """
    gray = (torch.arange(num_frames) * 37 % 256).to(torch.uint8)
    write_video(tmp_path / "clip.mp4", gray[:, None, None, None].expand(-1, 3, 32, 32), fps)
    back, got = read_video(tmp_path / "clip.mp4")
    assert got == pytest.approx(fps, rel=1e-6)
    assert back.shape == (num_frames, 3, 256, 256)
    assert (back.float().mean(dim=(1, 2, 3)) - gray).abs().max() < 3
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        times = [float(frame.pts * frame.time_base) for frame in container.decode(stream)]
        assert times == pytest.approx([number / fps for number in range(num_frames)])
        assert float(stream.duration * stream.time_base) == pytest.approx(num_frames / fps)


@pytest.mark.parametrize("height", [480, 720])
def test_colors_are_named_in_the_file_and_equal_at_every_size(tmp_path, height):
    """A player takes BT.709 from 720 lines on unless the file names its colors."""
    color = torch.tensor([200, 60, 30], dtype=torch.uint8)
    write_video(tmp_path / "clip.mp4", color[None, :, None, None].expand(2, 3, height, 320), fps=24)
    back, _ = read_video(tmp_path / "clip.mp4")
    assert (back.float().mean(dim=(0, 2, 3)) - color).abs().max() <= 2
    with av.open(str(tmp_path / "clip.mp4")) as container:
        codec = container.streams.video[0].codec_context
        smpte170m, limited = 6, 1
        assert (codec.colorspace, codec.color_primaries, codec.color_trc) == (smpte170m,) * 3
        assert codec.color_range == limited


def test_the_factor_is_the_smallest_with_256_pixels_and_even_sides():
    assert [mp4_factor(side, side) for side in (32, 128, 130, 256, 480)] == [8, 2, 2, 1, 1]
    assert mp4_factor(32, 64) == mp4_factor(64, 32) == 8
    assert mp4_factor(99, 120) == 4  # 3 would reach 297, which is odd


def test_a_crash_while_writing_keeps_the_old_file(tmp_path, monkeypatch):
    write_video(tmp_path / "old.mp4", moving_square(2), fps=8)
    before = (tmp_path / "old.mp4").read_bytes()

    def crash(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise RuntimeError("disk full")

    monkeypatch.setattr(Path, "write_bytes", crash)
    for name in ("old.mp4", "new.mp4"):
        with pytest.raises(RuntimeError, match="disk full"):
            write_video(tmp_path / name, moving_square(3), fps=8)
    assert [file.name for file in tmp_path.iterdir()] == ["old.mp4"]
    assert (tmp_path / "old.mp4").read_bytes() == before


def test_a_full_disk_raises_oserror(tmp_path, limited_file_size):
    """The disk has room for the first 64 KiB of a full-size video."""
    noise = torch.randint(0, 256, (4, 3, 256, 256), dtype=torch.uint8)
    with limited_file_size(2**16), pytest.raises(OSError, match="File too large"):
        write_video(tmp_path / "clip.mp4", noise, fps=8)
    assert not list(tmp_path.iterdir())
    write_video(tmp_path / "clip.mp4", noise, fps=8)
    assert (tmp_path / "clip.mp4").stat().st_size > 2**16


@pytest.mark.parametrize(
    ("video", "fps", "rule"),
    [
        (torch.zeros(2, 3, 32, 32), 8, "uint8 tensor"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), float("nan"), "fps"),
    ],
)
def test_invalid_videos_are_rejected_with_the_violated_rule(tmp_path, video, fps, rule):
    with pytest.raises(ValueError, match=rule):
        write_video(tmp_path / "clip.mp4", video, fps)
    assert not list(tmp_path.iterdir())


def test_truncated_and_empty_files_are_rejected(tmp_path):
    write_video(tmp_path / "whole.mp4", moving_square(), fps=8)
    whole = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mp4").touch()
    for name in ("half.mp4", "empty.mp4"):
        with pytest.raises(ValueError, match=name):
            read_video(tmp_path / name)


def test_floats_become_the_nearest_pixel_value():
    video = torch.tensor([-1.0, 1.0, 0.0, -5.0, 5.0, -1 + 2 * 100.4 / 255, -1 + 2 * 100.6 / 255])
    assert to_uint8(video).tolist() == [0, 255, 128, 0, 255, 100, 101]
    assert to_uint8(torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16)).shape == (2, 3, 4, 5)
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(pixels.float() / 127.5 - 1), pixels)


def test_decoded_videos_in_half_precision_are_scaled_to_pixels_in_float32():
    video = torch.linspace(-1, 1, 3 * 4 * 8).view(1, 3, 4, 8).to(torch.bfloat16)
    assert torch.equal(to_uint8(video), to_uint8(video.float()))
    limits = torch.tensor([-2.0, 2.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert to_uint8(limits.to(torch.bfloat16)).flatten().tolist() == [0, 255] * 3
