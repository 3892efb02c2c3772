"""A contact sheet of videos of the same prompts, before and after training or of several
policies.
"""

import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hyvideo.data.videos import read_frames
from hyvideo.files.files import publish

ACCENT = "#0b66c3"
NUM_FRAMES = 5  # of a video
FRAME_HEIGHT = 160  # pixels; more than the sheet shows
# Inches; frames are about one inch high.
TEXT_WIDTH = 2.8
ROW_HEIGHT = 1.5
HEADER_HEIGHT = 0.6
MARGIN = 0.2
MAX_PROMPT_LINES = 6
LINE_LENGTH = 32  # characters
WIDE = "\u1100"  # characters from here on are about twice as wide
WIDE_FONTS = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Microsoft YaHei",
)


def contact_sheet(
    path: str | os.PathLike,
    prompts: Sequence[str],
    clips: Mapping[str, Sequence[Tensor]],
    captions: Sequence[str],
) -> None:
    """Write a PNG with a row for each prompt: its caption and text, then frames of each policy from
    left to right.

    ``clips`` maps the title of a column to one video for each prompt, uint8 (frames, 3, height,
    width) of any size.
    """
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    strips = [[_strip(clip) for clip in column] for column in clips.values()]
    widths = [
        TEXT_WIDTH,
        *(max(strip.shape[1] / strip.shape[0] for strip in column) for column in strips),
    ]
    width = sum(widths) + MARGIN * (1 + len(widths))
    height = HEADER_HEIGHT + ROW_HEIGHT * len(prompts)
    fonts = ["DejaVu Sans", *(name for name in WIDE_FONTS if name in fontManager.get_font_names())]
    with rc_context({"font.family": fonts, "text.parse_math": False}), warnings.catch_warnings():
        # the picture shows a box for the character
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure(figsize=(width, height))
        grid = figure.subplots(len(prompts), len(widths), squeeze=False, width_ratios=widths)
        figure.subplots_adjust(
            left=MARGIN / width,
            right=1 - MARGIN / width,
            top=1 - HEADER_HEIGHT / height,
            bottom=MARGIN / height,
            wspace=0.05,
            hspace=0.4,
        )
        for axes in grid.flat:
            axes.set_axis_off()
            axes.set_anchor("NW")
        for axes, title in zip(grid[0, 1:], clips):
            axes.set_title(title, loc="left", weight="bold")
        for row, prompt, caption, *videos in zip(grid, prompts, captions, *strips, strict=True):
            row[0].set_title(caption, loc="left", color=ACCENT)
            row[0].text(0, 1, wrap(prompt), va="top")
            for axes, strip in zip(row[1:], videos):
                axes.imshow(strip)
        with publish(path) as aside:
            figure.savefig(aside, format="png", dpi=100)


def read_sheet_frames(path: str | os.PathLike) -> Tensor:
    """Return the frames of a video file that a contact sheet shows, in its size.

    Raises like `read_video`.
    """
    return _reduced(read_frames(path, even_indices))


def even_indices(num_frames: int) -> list[int]:
    """Return ``NUM_FRAMES`` evenly spaced indices, including the first and the last, or all of
    fewer frames.
    """
    return torch.linspace(0, num_frames - 1, min(NUM_FRAMES, num_frames)).round().long().tolist()


def _reduced(frames: Tensor) -> Tensor:
    """Average large frames over squares of pixels, to at least ``FRAME_HEIGHT`` pixels; return
    others as they are.
    """
    side = frames.shape[-2] // FRAME_HEIGHT
    if side < 2:
        return frames
    return torch.nn.functional.avg_pool2d(frames.float(), side).round().to(torch.uint8)


def _strip(video: Tensor) -> np.ndarray:
    """Return frames beside each other, with white between them.

    Shape: (height, width of all, 3).
    """
    frames = _reduced(video[even_indices(len(video))].cpu())
    spaced = torch.nn.functional.pad(frames, (0, max(1, frames.shape[-1] // 20)), value=255)
    return torch.cat(list(spaced), dim=2).permute(1, 2, 0).numpy()


def wrap(text: str) -> str:
    """Wrap a prompt to its column; an ellipsis marks text that does not fit."""
    length = LINE_LENGTH // 2 if any(letter >= WIDE for letter in text) else LINE_LENGTH
    return "\n".join(textwrap.wrap(text, length, max_lines=MAX_PROMPT_LINES, placeholder="..."))
