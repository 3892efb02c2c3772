"""Videos as tensors, and their reading and writing: written as H.264 mp4, read as a player shows
them.

A video is a uint8 RGB tensor (frames, channels, height, width).
"""

import os
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hyvideo.data.images import fit, pad
from hyvideo.data.video_files import (
    ClipForm,
    as_rate,
    at_rate,
    check_fps,
    check_length,
    mp4,
    mp4_factor,
    opened,
)
from hyvideo.files.files import publish


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


def enlarge(video: Tensor, factor: int) -> Tensor:
    """Repeat every pixel ``factor`` x ``factor`` times.

    Shape: (..., factor * height, factor * width).
    """
    return video.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)


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
        temporary.write_bytes(mp4(pixels.numpy(), as_rate(fps)))


def read_video(path: str | os.PathLike) -> tuple[Tensor, float]:
    """Read a video file's frames as a player shows them, and its frames per second.

    Shape: uint8 (frames, 3, height, width).

    Turned and mirrored frames, oblong pixels and edit lists are followed. A file of variable frame
    rate has its average rate, as in the original VideoAlign. Raises FileNotFoundError, and
    ValueError if the file has no video, no frame rate, too few frames or HDR colors.
    """
    with opened(path) as (header, pictures):
        frames = [picture.to_ndarray(format="rgb24") for picture in pictures]
    check_length(path, len(frames), header.num_frames)
    return _stacked(frames), header.fps


def read_frames(path: str | os.PathLike, choose: Callable[[int], Sequence[int]]) -> Tensor:
    """Read only some frames of a video file. Shape: uint8 (chosen frames, 3, height, width).

    ``choose`` maps the number of frames to the indices of those to read, in ascending order. Raises
    like `read_video`.
    """
    with opened(path) as (header, pictures):
        if not header.num_frames:  # not an mp4 of this project
            pixels, _ = read_video(path)
            return pixels[list(choose(len(pixels)))]
        wanted = choose(header.num_frames)
        found = {
            number: picture.to_ndarray(format="rgb24")
            for number, picture in enumerate(islice(pictures, max(wanted) + 1))
            if number in wanted
        }
    check_length(path, len(found), len(wanted))
    return _stacked([found[number] for number in wanted])


def read_clip(path: str | os.PathLike, form: ClipForm) -> Tensor:
    """Read a video in the form of a training video: at its rate, so that motion keeps its speed, and
    from its start.

    Shape: uint8 (frames, 3, height, width).

    Each frame is the picture whose time is nearest, or the one that is still shown. Raises like
    `read_video`, and ValueError for a video that is too short.
    """
    with opened(path) as (header, pictures):
        form.check(header, path)
        shown = islice(at_rate(pictures, header, form.fps), form.frames)
        frames = [picture.to_ndarray(format="rgb24") for picture in shown]
    if len(frames) < form.frames:
        check_length(path, len(frames), header.num_frames)
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


def _stacked(frames: list[np.ndarray]) -> Tensor:
    """Return frames (height, width, 3) as one tensor and free them. Shape: (frames, 3, height, width)."""
    pixels = np.stack(frames)
    frames.clear()  # frees their memory before the next copy
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
