"""A moving picture of videos of the same prompts, as an animated GIF or WebP that GitHub shows."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from hyvideo.data.videos import at_original_size, enlarge, read_video
from hyvideo.files.files import publish

SIDE = 128  # pixels on the shorter side of each video
GAP = 8  # pixels between videos
FONT_SIZE = 14
LINE_HEIGHT = 18
PROMPT_WIDTH = 170  # pixels of the column of prompts
LINE_LENGTH = 20  # characters of a prompt
MAX_LINES = 6
MAX_FRAMES = 41  # longer videos are shown with every second, third, ... frame
LAST_FRAME_MS = 700  # how long the last frame stands before the loop starts again
WEBP_QUALITY = 80


def moving_picture(
    path: Path, prompts: Sequence[str], clips: Mapping[str, Sequence[Tensor]], *, fps: float
) -> None:
    """Write an endless .gif or .webp with a row for each prompt and a column for each policy.

    ``clips`` maps the title of a column to one video for each prompt, uint8 (frames, 3, height,
    width). Without ``prompts``, the picture has the videos alone: no titles and no texts.
    """
    columns = [[_small(clip) for clip in column] for column in clips.values()]
    length = max(len(clip) for column in columns for clip in column)
    stride = math.ceil(length / MAX_FRAMES)
    tracks = [[_padded(clip, length) for clip in column] for column in columns]
    heights = [max(column[row].shape[-2] for column in tracks) for row in range(len(tracks[0]))]
    widths = [max(clip.shape[-1] for clip in column) for column in tracks]
    left = PROMPT_WIDTH if prompts else 0
    top = LINE_HEIGHT + GAP if prompts else 0
    size = (left + sum(widths) + GAP * (len(widths) - 1), top + sum(heights))
    size = (size[0], size[1] + GAP * (len(heights) - 1))
    blank = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(blank)
    corners = {}  # of each video, by row and column
    y = top
    for row, height in enumerate(heights):
        if prompts:
            lines = textwrap.wrap(prompts[row], LINE_LENGTH, max_lines=MAX_LINES, placeholder="...")
            draw.multiline_text((0, y), "\n".join(lines), "black", _font(), spacing=4)
        x = left
        for column, width in enumerate(widths):
            corners[row, column] = (x, y)
            x += width + GAP
        y += height + GAP
    if prompts:
        for column, title in enumerate(clips):
            draw.text((corners[0, column][0], 0), title, "black", _font())
    frames = []
    for number in range(0, length, stride):
        picture = blank.copy()
        for (row, column), corner in corners.items():
            pixels = tracks[column][row][number].permute(1, 2, 0).numpy()
            picture.paste(Image.fromarray(pixels), corner)
        frames.append(np.asarray(picture))
    _write(path, frames, fps / stride)


def read_clip(path: Path, height: int, width: int) -> Tensor:
    """Return the frames of a video file that was sampled at ``height`` x ``width``, in the size of
    the picture.

    Shape: uint8 (frames, 3, smaller height, smaller width). Raises like `read_video`.
    """
    return _small(at_original_size(read_video(path)[0], height, width))


def _small(video: Tensor) -> Tensor:
    """Return a video with about SIDE pixels on the shorter side; pixels of small videos stay squares."""
    height, width = video.shape[-2:]
    shorter = min(height, width)
    if shorter <= SIDE:
        return enlarge(video, max(1, SIDE // shorter))
    size = (round(height * SIDE / shorter), round(width * SIDE / shorter))
    resized = torch.nn.functional.interpolate(video.float(), size, mode="area")
    return resized.round().to(torch.uint8)


def _padded(video: Tensor, length: int) -> Tensor:
    """Return a video whose last frame is repeated up to ``length`` frames."""
    return torch.cat([video, video[-1:].expand(length - len(video), -1, -1, -1)])


def _write(path: Path, frames: list[np.ndarray], fps: float) -> None:
    import imageio.v3 as imageio

    durations = [1000 / fps] * (len(frames) - 1) + [LAST_FRAME_MS]
    options = {} if path.suffix == ".gif" else {"quality": WEBP_QUALITY, "method": 6}
    with publish(path) as aside:
        imageio.imwrite(
            aside,
            np.stack(frames),
            extension=path.suffix,
            plugin="pillow",
            duration=durations,
            loop=0,
            **options,
        )


@cache
def _font() -> ImageFont.FreeTypeFont:
    from matplotlib.font_manager import findfont

    return ImageFont.truetype(findfont("DejaVu Sans"), FONT_SIZE)
