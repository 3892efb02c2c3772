"""Reading and writing of video files, without ffmpeg: written as H.264 mp4, read as a player shows
them.

A video is a uint8 RGB tensor (frames, channels, height, width).
"""

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hyvideo.data.images import fit, pad
from hyvideo.files.files import publish

# av is imported where a file is read or written: checks of a GPU run on machines without it.
if TYPE_CHECKING:
    import av
    from av.container import InputContainer

MIN_MP4_SIDE = 256  # pixels
BT601 = 6  # of H.264's tables of primaries, transfer characteristics and matrices: SMPTE 170M
LIMITED_RANGE = 1  # luma from 16 to 235
# x264 weighs blocks by how much later frames depend on them ("mbtree"). With AVX-512, its code for
# this reads memory that was never written (core 165): two files of the same 49 frames with film
# grain differed by up to 25 levels.
X264_OPTIONS = {"mbtree": "0"}
PREVIEW_SIDE = 256  # pixels on the shorter side of a preview, at most
PREVIEW_CRF = "28"  # quality of a preview; 0 is lossless, 51 the worst
PREVIEW_BUFFER = 1.0  # seconds over which the limited bit rate of a preview is averaged
HDR = {16: "PQ", 18: "HLG"}  # transfer characteristics that players map to the screen's range
SAME_RATE = 0.01  # 23.976 and 24 frames per second are one rate
ROUNDED_TIME = Fraction(
    1, 10
)  # of a frame, by which a time may differ from that of a constant rate
# of WebP, from 0 to 100; the first whose picture is small enough is used
POSTER_QUALITIES = (60, 30, 10)


def to_uint8(video: Tensor) -> Tensor:
    """Convert a decoded video from [-1, 1] to uint8, without synchronizing with a GPU; NaN becomes
    any color.
    """
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def round_through(values: Tensor) -> Tensor:
    """Return rounded values whose gradient is the gradient of the values themselves (straight-through)."""
    return values + (values.round() - values).detach()


def to_levels(video: Tensor) -> Tensor:
    """Convert a decoded video from [-1, 1] to the levels of `to_uint8` as floats, whose gradient
    ignores the rounding.

    Values outside [-1, 1] have no gradient.
    """
    return round_through((video.float().clamp(-1, 1) + 1) * 127.5)


def check_video(video: Tensor) -> None:
    """Raise ValueError unless ``video`` is a uint8 RGB video with at least one frame."""
    if video.dtype != torch.uint8 or video.ndim != 4 or video.shape[1] != 3 or 0 in video.shape:
        raise ValueError(
            "a video must be a uint8 tensor (frames, 3, height, width) with at least one frame, "
            f"got {video.dtype} {tuple(video.shape)}; to_uint8 converts floats in [-1, 1]"
        )


def check_fps(fps: float) -> None:
    """Raise ValueError unless ``fps``, in frames per second, is a positive number."""
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be a positive number of frames per second, got {fps}")


def enlarge(video: Tensor, factor: int) -> Tensor:
    """Repeat every pixel ``factor`` x ``factor`` times.

    Shape: (..., factor * height, factor * width).
    """
    return video.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)


def mp4_factor(height: int, width: int) -> int:
    """Return the integer factor by which ``write_video`` enlarges a video; 1 from 256 pixels on the
    shorter side.

    yuv420p, with one color per 2 x 2 pixels, would change what a scorer sees, and needs even sizes.
    """
    shorter = min(height, width)
    if shorter >= MIN_MP4_SIDE:
        return 1
    factor = math.ceil(MIN_MP4_SIDE / shorter)
    return factor + factor % 2 if (height % 2 or width % 2) else factor


def at_original_size(video: Tensor, height: int, width: int) -> Tensor:
    """Reduce a video that `write_video` has enlarged to ``height`` x ``width``; return others as
    they are.

    Shape: uint8 (frames, 3, height, width).
    """
    factor = mp4_factor(height, width)
    if factor == 1 or tuple(video.shape[-2:]) != (height * factor, width * factor):
        return video
    blocks = video.float().unflatten(-1, (width, factor)).unflatten(-3, (height, factor))
    return blocks.mean((-3, -1)).round().to(torch.uint8)


def write_video(path: str | os.PathLike, video: Tensor, fps: float) -> None:
    """Write a video, uint8 (frames, 3, height, width), as H.264 mp4 at ``fps`` frames per second.

    Videos with less than 256 pixels on the shorter side are enlarged by ``mp4_factor``. The file is
    written atomically. Raises ValueError for an invalid tensor, and for odd sizes from 256 pixels
    upwards.
    """
    check_video(video)
    check_fps(fps)
    factor = mp4_factor(*video.shape[-2:])
    # (frames, height, width, channels)
    pixels = enlarge(video.detach().cpu(), factor).permute(0, 2, 3, 1)
    if pixels.shape[1] % 2 or pixels.shape[2] % 2:
        height, width = video.shape[-2:]
        raise ValueError(
            f"H.264 in yuv420p needs an even height and width, got {height} x {width}; crop the "
            "video"
        )
    with publish(path) as temporary:
        temporary.write_bytes(_mp4(pixels.numpy(), _as_rate(fps)))


def _as_rate(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(65535)


def _mp4(pixels: np.ndarray, rate: Fraction) -> bytes:
    """Encode frames as H.264 at ``rate`` frames per second.

    Shape: uint8 (frames, height, width, 3).
    """
    import av

    height, width = pixels.shape[1:3]
    pictures = (av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in pixels)
    return _encode(pictures, rate, height=height, width=width)


def _encode(
    pictures: "Iterable[av.VideoFrame]",
    rate: Fraction,
    *,
    height: int,
    width: int,
    options: Mapping[str, str] | None = None,  # of x264
) -> bytes:
    """Encode pictures as H.264 in yuv420p at ``rate`` frames per second, one at a time.

    The stream names its colors. Without a name, players take BT.709 from 720 lines on, and show
    other colors.
    """
    import av

    buffer = io.BytesIO()
    # seconds; not stream.time_base, which the muxer changes when it writes the header
    frame_duration = 1 / rate
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream(
            "libx264",
            rate,
            width=width,
            height=height,
            pix_fmt="yuv420p",
            time_base=frame_duration,
            options=X264_OPTIONS | dict(options or {}),
        )
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = BT601
        codec.color_range = LIMITED_RANGE
        for number, picture in enumerate(pictures):
            picture.pts = number
            picture.time_base = frame_duration
            file.mux(stream.encode(picture))
        file.mux(stream.encode())
    return buffer.getvalue()


def encode_preview(path: str | os.PathLike, *, max_bytes: int) -> bytes:
    """Return a video file as a small mp4 with all its frames, 256 pixels on the shorter side, for a
    web page.

    It has at most about ``max_bytes``. Only one frame of the file is in memory at a time. Raises
    like `read_video`.
    """
    with _opened(path) as (header, pictures):
        height, width = _preview_size(header.height, header.width)
        seconds = max(1, header.num_frames) / header.fps
        bits_per_second = str(int(8 * max_bytes / (seconds + PREVIEW_BUFFER)))
        options = {
            "preset": "veryfast",
            "crf": PREVIEW_CRF,
            "maxrate": bits_per_second,
            "bufsize": str(int(PREVIEW_BUFFER * int(bits_per_second))),
        }
        small = (
            picture.reformat(
                width, height, "yuv420p", dst_colorspace="ITU601", interpolation="AREA"
            )
            for picture in pictures
        )
        return _encode(small, _as_rate(header.fps), height=height, width=width, options=options)


def encode_poster(path: str | os.PathLike, *, max_bytes: int) -> bytes:
    """Return the first frame of a video file as a WebP picture of at most ``max_bytes``, for a web
    page.

    It has at most 256 pixels on the shorter side. It is empty if no quality is small enough. Raises
    like `read_video`.
    """
    with _opened(path) as (_, pictures):
        picture = next(pictures)
        height, width = _preview_size(picture.height, picture.width)
        image = picture.reformat(width, height, "rgb24", interpolation="AREA").to_image()
    for quality in POSTER_QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=quality)
        if buffer.tell() <= max_bytes:
            return buffer.getvalue()
    return b""


def _preview_size(height: int, width: int) -> tuple[int, int]:
    """Return the even height and width of a preview."""
    factor = min(1.0, PREVIEW_SIDE / min(height, width))
    return 2 * max(1, round(height * factor / 2)), 2 * max(1, round(width * factor / 2))


def read_video(path: str | os.PathLike) -> tuple[Tensor, float]:
    """Read a video file's frames as a player shows them, and its frames per second.

    Shape: uint8 (frames, 3, height, width).

    Turned and mirrored frames, oblong pixels and edit lists are followed. A file of variable frame
    rate has its average rate, as in the original VideoAlign. Raises FileNotFoundError, and
    ValueError if the file has no video, no frame rate, too few frames or HDR colors.
    """
    with _opened(path) as (header, pictures):
        frames = [picture.to_ndarray(format="rgb24") for picture in pictures]
    _check_length(path, len(frames), header.num_frames)
    return _stacked(frames), header.fps


def read_frames(path: str | os.PathLike, choose: Callable[[int], Sequence[int]]) -> Tensor:
    """Read only some frames of a video file. Shape: uint8 (chosen frames, 3, height, width).

    ``choose`` maps the number of frames to the indices of those to read, in ascending order. Raises
    like `read_video`.
    """
    with _opened(path) as (header, pictures):
        if not header.num_frames:  # not an mp4 of this project
            pixels, _ = read_video(path)
            return pixels[list(choose(len(pixels)))]
        wanted = choose(header.num_frames)
        found = {
            number: picture.to_ndarray(format="rgb24")
            for number, picture in enumerate(islice(pictures, max(wanted) + 1))
            if number in wanted
        }
    _check_length(path, len(found), len(wanted))
    return _stacked([found[number] for number in wanted])


class Header(NamedTuple):
    """Length, size and frame rate of a video, as a player shows it."""

    num_frames: int  # 0 if the file does not state it
    height: int
    width: int
    fps: float


def read_header(path: str | os.PathLike) -> Header:
    """Return what a video file states, and decode its first frame only.

    Raises like `read_video`, but not for missing frames.
    """
    with _opened(path) as (header, _):
        return header


@dataclass(frozen=True)
class ClipForm:
    """Frames, size in pixels and rate to which videos are brought before they are trained on."""

    frames: int
    height: int
    width: int
    fps: float
    fit: str = "crop"  # another size: cut, with black borders (pad), or an error (none)

    def check(self, found: Header, path: str | os.PathLike) -> None:
        """Raise ValueError for a video that cannot be brought to this form, as far as its header
        says.
        """
        if self.fit == "none" and not self.has_size(found.height, found.width):
            raise ValueError(
                f"a training video must have {self.height} x {self.width} pixels (height, width) "
                f"with fit none, got {found.height} x {found.width} in {path}; set fit crop or pad"
            )
        if found.num_frames and self._length(found) < self.frames:
            raise ValueError(
                f"a training video must last {self.frames} frames at {self.fps:g} per second "
                f"(sample_n_frames, fps), got {found.num_frames} at {found.fps:g} in {path}; lower "
                "sample_n_frames, set the fps of the videos, or leave this one out"
            )

    def changes(self, found: Header) -> list[str]:
        """Return what is done to a video of this header."""
        done = []
        if abs(found.fps / self.fps - 1) > SAME_RATE:
            done.append(f"resampled from another rate to fps {self.fps:g}")
        if found.fps < self.fps * (1 - SAME_RATE):
            done.append("repeat frames, because they have fewer per second")
        if not found.num_frames:
            done.append("of a length that their files do not state, which may be too short")
        elif self._length(found) > self.frames:
            done.append(f"cut to their first {self.frames} frames")
        if not self.has_size(found.height, found.width):
            done.append(f"resized to {self.height} x {self.width} ({self.fit})")
            if found.height < self.height or found.width < self.width:
                done.append("enlarged")
        return done

    def _length(self, found: Header) -> int:
        """Return the number of frames at the rate of this form."""
        return max(1, math.floor(found.num_frames / found.fps * self.fps + 0.5 + 1e-6))

    def has_size(self, height: int, width: int) -> bool:
        """Return whether a file has this size, perhaps enlarged by `write_video`."""
        factor = mp4_factor(self.height, self.width)
        return (height, width) in (
            (self.height, self.width),
            (self.height * factor, self.width * factor),
        )


def read_clip(path: str | os.PathLike, form: ClipForm) -> Tensor:
    """Read a video in the form of a training video: at its rate, so that motion keeps its speed, and
    from its start.

    Shape: uint8 (frames, 3, height, width).

    Each frame is the picture whose time is nearest, or the one that is still shown. Raises like
    `read_video`, and ValueError for a video that is too short.
    """
    with _opened(path) as (header, pictures):
        form.check(header, path)
        shown = islice(_at_rate(pictures, header, form.fps), form.frames)
        frames = [picture.to_ndarray(format="rgb24") for picture in shown]
    if len(frames) < form.frames:
        _check_length(path, len(frames), header.num_frames)
        raise ValueError(
            f"a training video must have {form.frames} frames at {form.fps:g} per second "
            f"(sample_n_frames, fps), got {len(frames)} in {path}; lower sample_n_frames or leave "
            "the video out"
        )
    if form.has_size(header.height, header.width):
        return at_original_size(_stacked(frames), form.height, form.width)
    fitted = pad if form.fit == "pad" else fit
    images = [fitted(Image.fromarray(frame), form.height, form.width) for frame in frames]
    return _stacked([np.array(image) for image in images])


def _at_rate(
    pictures: "Iterable[av.VideoFrame]", header: Header, fps: float
) -> "Iterator[av.VideoFrame]":
    """Yield the picture of each frame at another rate."""
    own = _as_rate(header.fps)
    rate = _as_rate(fps)
    start = None
    shown = None
    count = 0
    end = Fraction(0)
    for number, picture in enumerate(pictures):
        time = Fraction(number) / own
        if picture.pts is not None:
            stated = picture.pts * picture.time_base
            start = stated if start is None else start
            # containers round times, some to milliseconds
            if abs((stated - start - time) * own) > ROUNDED_TIME:
                time = stated - start
        while shown is not None and count / rate <= time - 1 / (2 * own):
            yield shown
            count += 1
        shown = picture
        end = time + 1 / own
    while shown is not None and count < max(1, math.floor(end * rate + Fraction(1, 2))):
        yield shown
        count += 1


def is_as_written(path: str | os.PathLike) -> bool:
    """Return whether a file has the codec, colors and metadata of the files of `write_video`.

    Raises like `read_video`.

    Copies of such files reveal nothing about the program that wrote them.
    """
    import av

    with _file(path) as (file, stream):
        found = _storage(file, stream)
    black = np.zeros((1, MIN_MP4_SIDE, MIN_MP4_SIDE, 3), dtype=np.uint8)
    with av.open(io.BytesIO(_mp4(black, Fraction(1)))) as file:
        return found == _storage(file, file.streams.video[0])


def _storage(file: "InputContainer", stream: "av.VideoStream") -> tuple:
    codec = stream.codec_context
    colors = codec.colorspace, codec.color_range, codec.color_primaries, codec.color_trc
    return len(file.streams), codec.name, codec.pix_fmt, colors, file.metadata, stream.metadata


@contextmanager
def _file(path: str | os.PathLike) -> "Iterator[tuple[InputContainer, av.VideoStream]]":
    """Context manager that yields a file and its video stream.

    Raises ValueError if the file cannot be decoded.
    """
    import av

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no video file {path}")
    try:
        with av.open(os.fspath(path)) as file:
            if not file.streams.video:
                raise ValueError(f"{path} is not a video: it has no video stream")
            yield file, file.streams.video[0]
    except av.FFmpegError as error:
        raise ValueError(f"{path} is not a video: it is corrupted or truncated") from error


@contextmanager
def _opened(path: str | os.PathLike) -> "Iterator[tuple[Header, Iterator[av.VideoFrame]]]":
    """Context manager that yields the header of a file and its pictures, both as a player shows
    them.

    Every reading of a video passes here. Raises like `read_video`.
    """
    with _file(path) as (file, stream):
        decoded = file.decode(stream)
        first = next(decoded, None)
        if first is None:
            _check_length(path, 0, stream.frames)
        if first.color_trc in HDR:
            raise ValueError(
                f"{path} is in HDR ({HDR[first.color_trc]}), which is not read: its colors would be "
                "wrong. Convert it to SDR, for example with ffmpeg's filters zscale and tonemap"
            )
        fps = float(stream.average_rate or 0)
        if fps <= 0:
            raise ValueError(f"{path} has no frame rate; write it again with one")
        num_frames = stream.frames
        if stream.duration:  # without what an edit list leaves out
            num_frames = min(num_frames, round(stream.duration * stream.time_base * fps))
        width = round(first.width * (stream.sample_aspect_ratio or 1))  # of square pixels
        turn = _turn_of(first, path)
        pictures = chain([first], decoded)
        if turn or width != first.width:
            pictures = (_shown(picture, width, turn or _unturned) for picture in pictures)
            first = next(pictures)
            pictures = chain([first], pictures)
        yield Header(num_frames, first.height, first.width, fps), pictures


def _shown(
    picture: "av.VideoFrame", width: int, turn: Callable[[np.ndarray], np.ndarray]
) -> "av.VideoFrame":
    """Return a picture with square pixels, turned; its time stays."""
    import av

    pixels = turn(picture.to_ndarray(format="rgb24", width=width, height=picture.height))
    shown = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    shown.pts = picture.pts
    shown.time_base = picture.time_base
    return shown


def _unturned(pixels: np.ndarray) -> np.ndarray:
    return pixels


def _turn_of(
    picture: "av.VideoFrame", path: str | os.PathLike
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function that turns and mirrors the pixels, (height, width, 3), as the file's
    display matrix says; None without one, or one that changes nothing.

    The matrix takes (x, y) to (a x + c y, b x + d y). Raises ValueError unless it is a multiple of
    a right angle.
    """
    import av

    # side_data makes a cycle that keeps the decoder and its threads alive until the next collection
    if not picture.rotation:
        return None
    try:
        data = picture.side_data[av.sidedata.sidedata.Type.DISPLAYMATRIX]
        matrix = np.frombuffer(bytes(data), np.int32)[:5]
    except ValueError:  # PyAV does not know all that a frame may have beside it, such as EXIF
        angle = math.radians(-picture.rotation)
        cos, sin = math.cos(angle), math.sin(angle)
        matrix = np.array([cos, sin, 0.0, -sin, cos]).round(6)
    a, b, _, c, d = map(int, np.sign(matrix))
    if b and c and not (a or d):
        rows, columns = b, c
    elif a and d and not (b or c):
        rows, columns = d, a
    else:
        raise ValueError(
            f"{path} is turned by an angle that is not a multiple of 90 degrees; turn its frames"
        )

    def turn(pixels: np.ndarray) -> np.ndarray:
        if not a:
            pixels = pixels.transpose(1, 0, 2)
        return pixels[::rows, ::columns]

    return turn


def _stacked(frames: list[np.ndarray]) -> Tensor:
    """Return frames (height, width, 3) as one tensor and free them. Shape: (frames, 3, height, width)."""
    pixels = np.stack(frames)
    frames.clear()  # frees their memory before the next copy
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _check_length(path: str | os.PathLike, found: int, expected: int) -> None:
    if not found or found < expected:
        raise ValueError(
            f"{path} has {found} frames, expected {expected or 'at least 1'}; write it again"
        )
