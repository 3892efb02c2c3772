"""Reading and writing of video files: H.264 mp4, without ffmpeg.

A video is a uint8 RGB tensor (frames, channels, height, width).
"""

import io
import math
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from hyvideo.data.outside import replacing

MIN_MP4_SIDE = 256  # pixels
BT601 = 6  # of H.264's tables of primaries, transfer characteristics and matrices: SMPTE 170M
LIMITED_RANGE = 1  # luma from 16 to 235
# x264 weighs blocks by how much later frames depend on them ("mbtree"). With AVX-512, its code for this reads memory
# that was never written (core 165): two files of the same 49 frames with film grain differed by up to 25 levels.
X264_OPTIONS = {"mbtree": "0"}


def to_uint8(video: Tensor) -> Tensor:
    """Convert a decoded video from [-1, 1] to uint8, without synchronizing with a GPU; NaN becomes any color."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


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
    """Repeat every pixel ``factor`` x ``factor`` times. Shape: (..., factor * height, factor * width)."""
    return video.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)


def mp4_factor(height: int, width: int) -> int:
    """Return the integer factor by which ``write_video`` enlarges a video; 1 from 256 pixels on the shorter side.

    yuv420p, with one color per 2 x 2 pixels, would change what a scorer sees, and needs even sizes.
    """
    shorter = min(height, width)
    if shorter >= MIN_MP4_SIDE:
        return 1
    factor = math.ceil(MIN_MP4_SIDE / shorter)
    return factor + factor % 2 if (height % 2 or width % 2) else factor


def write_video(path: str | os.PathLike, video: Tensor, fps: float) -> None:
    """Write a video, uint8 (frames, 3, height, width), as H.264 mp4 at ``fps`` frames per second.

    Videos with less than 256 pixels on the shorter side are enlarged by ``mp4_factor``. The file is written atomically.
    Raises ValueError for an invalid tensor, and for odd sizes from 256 pixels upwards.
    """
    check_video(video)
    check_fps(fps)
    factor = mp4_factor(*video.shape[-2:])
    pixels = enlarge(video.detach().cpu(), factor).permute(0, 2, 3, 1)  # (frames, height, width, channels)
    if pixels.shape[1] % 2 or pixels.shape[2] % 2:
        height, width = video.shape[-2:]
        raise ValueError(f"H.264 in yuv420p needs an even height and width, got {height} x {width}; crop the video")
    with replacing(path) as temporary:
        temporary.write_bytes(_mp4(pixels.numpy(), Fraction(fps).limit_denominator(65535)))


def _mp4(pixels: np.ndarray, rate: Fraction) -> bytes:
    """Encode frames as H.264 in yuv420p at ``rate`` frames per second. Shape: uint8 (frames, height, width, 3).

    The stream names its colors. Without a name, players take BT.709 from 720 lines on, and show other colors.
    """
    buffer = io.BytesIO()
    frame_duration = 1 / rate  # seconds; not stream.time_base, which the muxer changes when it writes the header
    with av.open(buffer, "w", format="mp4") as file:
        height, width = pixels.shape[1:3]
        stream = file.add_stream(
            "libx264",
            rate,
            width=width,
            height=height,
            pix_fmt="yuv420p",
            time_base=frame_duration,
            options=X264_OPTIONS,
        )
        codec = stream.codec_context
        codec.colorspace = codec.color_primaries = codec.color_trc = BT601
        codec.color_range = LIMITED_RANGE
        for number, frame in enumerate(pixels):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = number
            picture.time_base = frame_duration
            file.mux(stream.encode(picture))
        file.mux(stream.encode())
    return buffer.getvalue()


def read_video(path: str | os.PathLike) -> tuple[Tensor, float]:
    """Read a video file's frames as stored and its frames per second. Shape: uint8 (frames, 3, height, width).

    Raises FileNotFoundError, and ValueError if the file has no video, no frame rate or too few frames.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no video file {path}")
    try:
        with av.open(os.fspath(path)) as file:
            stream = file.streams.video[0]
            frames = [picture.to_ndarray(format="rgb24") for picture in file.decode(stream)]
            fps, num_frames = float(stream.guessed_rate or 0), stream.frames
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is not a video: it is corrupted, truncated or has no video stream") from error
    if not frames or len(frames) < num_frames:
        raise ValueError(f"{path} has {len(frames)} frames, expected {num_frames or 'at least 1'}; write it again")
    if fps <= 0:
        raise ValueError(f"{path} has no frame rate; write it again with one")
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous(), fps
