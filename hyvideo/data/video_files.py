"""Files of videos, without tensors: their header, their pictures as a player shows them, and their
encoding as H.264 mp4, all without ffmpeg.

`videos` reads and writes them as tensors. This file does not import torch.
"""

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
HDR = {16: "PQ", 18: "HLG"}  # transfer characteristics that players map to the screen's range
SAME_RATE = 0.01  # 23.976 and 24 frames per second are one rate
ROUNDED_TIME = Fraction(
    1, 10
)  # of a frame, by which a time may differ from that of a constant rate


def check_fps(fps: float) -> None:
    """Raise ValueError unless ``fps``, in frames per second, is a positive number."""
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be a positive number of frames per second, got {fps}")


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


def as_rate(fps: float) -> Fraction:
    """Return a frame rate as the fraction that a file states."""
    return Fraction(fps).limit_denominator(65535)


def mp4(pixels: np.ndarray, rate: Fraction) -> bytes:
    """Encode frames as H.264 at ``rate`` frames per second.

    Shape: uint8 (frames, height, width, 3).
    """
    import av

    height, width = pixels.shape[1:3]
    pictures = (av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in pixels)
    return encode(pictures, rate, height=height, width=width)


def encode(
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
    with opened(path) as (header, _):
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


def at_rate(
    pictures: "Iterable[av.VideoFrame]", header: Header, fps: float
) -> "Iterator[av.VideoFrame]":
    """Yield the picture of each frame at another rate."""
    own = as_rate(header.fps)
    rate = as_rate(fps)
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
    with av.open(io.BytesIO(mp4(black, Fraction(1)))) as file:
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
def opened(path: str | os.PathLike) -> "Iterator[tuple[Header, Iterator[av.VideoFrame]]]":
    """Context manager that yields the header of a file and its pictures, both as a player shows
    them.

    Every reading of a video passes here. Raises like `read_video`.
    """
    with _file(path) as (file, stream):
        decoded = file.decode(stream)
        first = next(decoded, None)
        if first is None:
            check_length(path, 0, stream.frames)
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


def check_length(path: str | os.PathLike, found: int, expected: int) -> None:
    """Raise ValueError for a file that has no frames, or fewer than it states."""
    if not found or found < expected:
        raise ValueError(
            f"{path} has {found} frames, expected {expected or 'at least 1'}; write it again"
        )
