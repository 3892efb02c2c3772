"""Tests of video files: pixels, frames and timing survive encoding and decoding, and writes are
atomic.
"""

import io
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from hyvideo.data import examples
from hyvideo.data.previews import encode_poster, encode_preview
from hyvideo.data.prompts import Request
from hyvideo.data.video_files import ClipForm, mp4_factor, read_header
from hyvideo.data.videos import (
    at_original_size,
    read_clip,
    read_frames,
    read_video,
    to_uint8,
    write_video,
)
from hyvideo.files import text

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


# --- as a player shows it -------------------------------------------------------------------------

# The pixel (0, 0) of a stored picture is at this corner: top or bottom, left or right.
MATRICES = {
    "90": ([0, 1, 0, -1, 0], "top right", (320, 256)),
    "180": ([-1, 0, 0, 0, -1], "bottom right", (256, 320)),
    "270": ([0, -1, 0, 1, 0], "bottom left", (320, 256)),
    "mirror": ([-1, 0, 0, 0, 1], "top right", (256, 320)),
    "mirrored 90": ([0, 1, 0, 1, 0], "top left", (320, 256)),
}


def counting(num_frames: int) -> torch.Tensor:
    """Return frames whose red says their number, with a green corner at the top left."""
    video = torch.zeros(num_frames, 3, 256, 320, dtype=torch.uint8)
    video[:, 0] = 20 * torch.arange(num_frames)[:, None, None]
    video[:, 1, :64, :80] = 200
    return video


def numbers(video: torch.Tensor) -> list[int]:
    """Return the numbers of the frames of `counting`."""
    return (video[:, 0, video.shape[2] // 2, video.shape[3] // 2] / 20).round().int().tolist()


def green_corner(video: torch.Tensor) -> str:
    rows, columns = np.argwhere(video[0, 1].numpy() > 100).mean(0) / video.shape[2:]
    return f"{'top' if rows < 0.5 else 'bottom'} {'left' if columns < 0.5 else 'right'}"


def with_matrix(source: Path, path: Path, entries: list[float]) -> Path:
    """Copy an mp4 with another display matrix, as phones write it (a, b, u, c, d, ...)."""
    content = bytearray(source.read_bytes())
    identity = np.array([1, 0, 0, 0, 1], ">f8") * 65536
    place = content.index(identity.astype(">i4").tobytes(), content.index(b"tkhd"))
    content[place : place + 20] = (np.array(entries) * 65536).astype(">i4").tobytes()
    path.write_bytes(content)
    return path


def copied(source: Path, path: Path, form: str = "mp4", *, shift=0, times=None, **options) -> Path:
    """Copy the packets of an mp4 into another container, earlier by some frames or at ``times`` in
    seconds.
    """
    with av.open(str(source)) as file, av.open(str(path), "w", format=form, options=options) as out:
        stream = file.streams.video[0]
        copy = out.add_stream_from_template(stream)
        packets = [packet for packet in file.demux(stream) if packet.dts is not None]
        frame = int(1 / stream.average_rate / stream.time_base)
        for packet in packets:
            number = packet.pts // frame
            if times:
                packet.pts = packet.dts = int(times[number] / stream.time_base)
            packet.pts -= shift * frame
            packet.dts -= shift * frame
            packet.stream = copy
            out.mux(packet)
    return path


@pytest.fixture
def clip(tmp_path):
    """A video of 12 frames at 8 per second without reordered frames."""
    path = tmp_path / "clip.mp4"
    write_video(path, counting(12), fps=8)
    return path


@pytest.mark.parametrize("name", MATRICES)
def test_turned_and_mirrored_videos_are_read_as_a_player_shows_them(clip, tmp_path, name):
    """Phones store the picture lying on its side and a matrix in the header."""
    entries, corner, size = MATRICES[name]
    assert green_corner(read_video(clip)[0]) == "top left"
    turned = with_matrix(clip, tmp_path / "turned.mp4", entries)
    video, fps = read_video(turned)
    assert (green_corner(video), tuple(video.shape[2:]), fps) == (corner, size, 8)
    assert numbers(video) == list(range(12))
    assert read_header(turned) == (12, *size, 8)
    assert green_corner(read_frames(turned, lambda count: [count - 1])) == corner
    poster = Image.open(io.BytesIO(encode_poster(turned, max_bytes=20_000)))
    assert poster.size == size[::-1]
    (tmp_path / "preview.mp4").write_bytes(encode_preview(turned, max_bytes=50_000))
    preview, _ = read_video(tmp_path / "preview.mp4")
    assert green_corner(preview) == corner and len(preview) == 12
    assert green_corner(read_clip(turned, ClipForm(5, *size, 8))) == corner


def test_a_video_turned_by_another_angle_is_refused(clip, tmp_path):
    turned = with_matrix(clip, tmp_path / "turned.mp4", [0.7, 0.7, 0, -0.7, 0.7])
    with pytest.raises(ValueError, match="turned.mp4.*90 degrees"):
        read_video(turned)


def encoded(path: Path, num_frames: int = 2, **codec) -> Path:
    """Write a video with these attributes of the codec."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", 8, width=320, height=256, pix_fmt="yuv420p")
        for name, value in codec.items():
            setattr(stream.codec_context, name, value)
        for frame in counting(num_frames).permute(0, 2, 3, 1).numpy():
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return path


def test_oblong_pixels_are_made_square(tmp_path):
    """DV and DVDs have them."""
    path = encoded(tmp_path / "wide.mp4", sample_aspect_ratio=Fraction(16, 11))
    assert read_video(path)[0].shape == (2, 3, 256, 465)
    assert read_header(path)[1:3] == (256, 465)


@pytest.mark.parametrize("transfer, name", [(18, "HLG"), (16, "PQ")])
def test_hdr_is_refused_by_name(tmp_path, transfer, name):
    path = encoded(tmp_path / "hdr.mp4", color_trc=transfer, color_primaries=9, colorspace=9)
    with pytest.raises(ValueError, match=f"hdr.mp4.* HDR .{name}"):
        read_header(path)


def test_what_an_edit_list_leaves_out_is_not_read(clip, tmp_path):
    """A phone trims a video so; a player shows 9 frames of the 12."""
    options = {"use_editlist": "1", "avoid_negative_ts": "disabled"}
    trimmed = copied(clip, tmp_path / "trimmed.mp4", shift=3, **options)
    assert numbers(read_video(trimmed)[0]) == list(range(3, 12))
    assert read_header(trimmed).num_frames == 9
    assert numbers(read_clip(trimmed, ClipForm(9, 256, 320, 8))) == list(range(3, 12))


# --- in the form of a training video --------------------------------------------------------------


@pytest.mark.parametrize(
    "fps, frames, expected",
    [
        (8, 12, list(range(12))),
        (8, 5, [0, 1, 2, 3, 4]),
        (4, 6, [0, 2, 4, 6, 8, 10]),
        (16, 7, [0, 0, 1, 1, 2, 2, 3]),
        (8.004, 12, list(range(12))),  # like 23.976 and 24
        (5, 7, [0, 2, 3, 5, 6, 8, 10]),  # times 0, .2, .4, ... of frames at .125
    ],
)
def test_motion_keeps_its_speed(clip, fps, frames, expected):
    """Videos of 30 frames per second were trained on as if they had 8, and slow motion was learnt."""
    assert numbers(read_clip(clip, ClipForm(frames, 256, 320, fps))) == expected


@pytest.mark.parametrize("name, form", [("a.mkv", "matroska"), ("a.ts", "mpegts")])
def test_other_containers_have_the_same_frames_and_their_length_is_counted(
    clip, tmp_path, name, form
):
    """They state no length, and mkv rounds times to milliseconds."""
    path = copied(clip, tmp_path / name, form)
    assert read_header(path).num_frames == 0
    assert numbers(read_clip(path, ClipForm(12, 256, 320, 8))) == list(range(12))
    assert numbers(read_clip(path, ClipForm(6, 256, 320, 4))) == [0, 2, 4, 6, 8, 10]
    with pytest.raises(ValueError, match=f"13 frames .*got 12 in .*{name}"):
        read_clip(path, ClipForm(13, 256, 320, 8))


def test_a_video_of_variable_rate_is_read_at_the_times_of_its_frames(tmp_path):
    """Screen recordings and phones: here, frame 1 is shown for a second."""
    with av.open(str(tmp_path / "variable.mkv"), "w") as file:
        stream = file.add_stream("libx264", 8, width=320, height=256, pix_fmt="yuv420p")
        stream.codec_context.time_base = Fraction(1, 1000)
        for time, frame in zip((0, 125, 1125, 1250), counting(4).permute(0, 2, 3, 1).numpy()):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = time, Fraction(1, 1000)
            file.mux(stream.encode(picture))
        file.mux(stream.encode())
    form = ClipForm(11, 256, 320, 8)
    assert numbers(read_clip(tmp_path / "variable.mkv", form)) == [0, *[1] * 8, 2, 3]


def test_a_video_that_is_too_short_is_refused_by_its_header(clip):
    with pytest.raises(ValueError, match="13 frames at 8 per second .*got 12 at 8"):
        read_clip(clip, ClipForm(13, 256, 320, 8))
    with pytest.raises(ValueError, match="13 frames at 8 per second"):
        examples.check_videos(
            [examples.Example(Request("a"), (clip,), "row 1")], ClipForm(13, 256, 320, 8)
        )


def test_another_size_is_cropped_padded_or_refused(clip):
    cropped = read_clip(clip, ClipForm(2, 128, 128, 8, "crop"))
    padded = read_clip(clip, ClipForm(2, 128, 128, 8, "pad"))
    assert cropped.shape == padded.shape == (2, 3, 128, 128)
    assert cropped[0, 1, 16, 16] > 190  # the corner of 80 x 64, halved, less 16 columns
    assert padded[0, :, :12].max() == 0 < padded[0, 1, 20, 10]
    with pytest.raises(ValueError, match="128 x 128 pixels .* fit none, got 256 x 320"):
        read_clip(clip, ClipForm(2, 128, 128, 8, "none"))


def test_videos_of_this_project_are_read_as_before(tmp_path):
    """Enlarged small videos are reduced to their own pixels, without resampling."""
    write_video(tmp_path / "small.mp4", moving_square(), fps=8)
    form = ClipForm(9, 32, 32, 8, "none")
    assert not form.changes(read_header(tmp_path / "small.mp4"))
    expected = at_original_size(read_video(tmp_path / "small.mp4")[0], 32, 32)
    assert torch.equal(read_clip(tmp_path / "small.mp4", form), expected)


def test_a_line_says_what_is_done_to_how_many_videos(clip, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(examples, "note", text.note.__wrapped__)
    write_video(tmp_path / "same.mp4", counting(3), fps=4)
    given = [
        examples.Example(Request("a"), (path,), "row 1") for path in (clip, tmp_path / "same.mp4")
    ]
    examples.check_videos(given, ClipForm(3, 256, 320, 4))
    line = capfd.readouterr().err
    assert "of 2 videos" in line and "1 resampled" in line and "1 cut" in line
    assert "resized" not in line
    examples.check_videos(given[1:], ClipForm(3, 256, 320, 4))
    assert not capfd.readouterr().err


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp"])
def test_a_picture_is_a_video_of_one_frame_turned_by_exif(tmp_path, name):
    """Pairs of HPDv3, and image data sets."""
    pixels = np.zeros((48, 64, 3), np.uint8)
    pixels[:12, :16] = (0, 255, 0)
    exif = Image.Exif()
    exif[0x112] = 6 if name == "a.jpg" else 1  # turned by 90 degrees to the right
    Image.fromarray(pixels).save(tmp_path / name, exif=exif)
    size = (64, 48) if name == "a.jpg" else (48, 64)
    for fps in (8, 24):
        video = read_clip(tmp_path / name, ClipForm(1, *size, fps))
        assert video.shape == (1, 3, *size)
        assert green_corner(video) == ("top right" if name == "a.jpg" else "top left")
    with pytest.raises(ValueError, match=f"2 frames .*got 1 in .*{name}"):
        read_clip(tmp_path / name, ClipForm(2, *size, 8))
