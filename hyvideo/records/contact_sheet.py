"""A contact sheet of videos of the same prompts, before and after training or of several policies."""

import itertools
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from hyvideo.data.outside import replacing

INK, ACCENT = "#1f2328", "#0b66c3"
DPI = 72  # one point is one pixel; all lengths here are in pixels
NUM_FRAMES, FRAME_HEIGHT = 5, 96
MARGIN, HEADER_HEIGHT = 24, 54
CAPTION_WIDTH = 256  # from the prompts to the first frame
FRAME_GAP, GUTTER, ROW_GAP = 5, 44, 26  # between frames, between columns, between rows
TEXT_SIZE, LINE_HEIGHT = 14, 20
MAX_PROMPT_LINES, LINE_LENGTH = 7, 28  # lines, characters
WIDE = "\u1100"  # characters from here on are about twice as wide
WIDE_FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")


def contact_sheet(
    path: str | os.PathLike, prompts: Sequence[str], clips: Mapping[str, Sequence[Tensor]], captions: Sequence[str]
) -> None:
    """Write a PNG with a row for each prompt: its text and caption, then frames of each policy from left to right.

    ``clips`` maps the title of a column to one video for each prompt, uint8 (frames, 3, height, width) of any size.
    """
    columns = {
        title: [[fit_frame(frame) for frame in even_frames(clip)] for clip in column] for title, column in clips.items()
    }
    texts = [(wrap(prompt), caption) for prompt, caption in zip(prompts, captions, strict=True)]
    with replacing(path) as aside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the picture shows a box for the character
        _draw(texts, columns).savefig(aside, format="png", dpi=DPI)


def even_frames(video: Tensor) -> Tensor:
    """Return ``NUM_FRAMES`` evenly spaced frames, including the first and the last, or all of a shorter video."""
    return video[torch.linspace(0, len(video) - 1, min(NUM_FRAMES, len(video))).round().long()]


def fit_frame(frame: Tensor) -> Image.Image:
    """Fit a uint8 frame (channels, height, width) to ``FRAME_HEIGHT``: enlarged by an integer factor, or shrunk."""
    image = Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy())
    factor = FRAME_HEIGHT // image.height
    if factor >= 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    width = max(1, round(image.width * FRAME_HEIGHT / image.height))
    return image.resize((width, FRAME_HEIGHT), Image.Resampling.LANCZOS)


def wrap(text: str) -> list[str]:
    """Wrap a prompt to its column; an ellipsis marks text that does not fit."""
    length = LINE_LENGTH // 2 if any(letter >= WIDE for letter in text) else LINE_LENGTH
    return textwrap.wrap(text, length, max_lines=MAX_PROMPT_LINES, placeholder="...")


def _draw(texts: list[tuple[list[str], str]], columns: dict[str, list[list[Image.Image]]]):
    """Return the figure. ``texts`` are wrapped prompt and caption of each row; ``columns`` has frames by row."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.font_manager import fontManager

    cell_width = FRAME_GAP + max(image.width for column in columns.values() for row in column for image in row)
    widths = [max(map(len, column)) * cell_width + GUTTER for column in columns.values()]
    first = MARGIN + CAPTION_WIDTH
    lefts = list(itertools.accumulate(widths, initial=first))  # of each column, and the right end of the last
    row_height = max(FRAME_HEIGHT, *((len(lines) + 1) * LINE_HEIGHT for lines, _ in texts)) + ROW_GAP
    width, height = lefts[-1] - GUTTER + MARGIN, HEADER_HEIGHT + len(texts) * row_height
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    fonts = ["DejaVu Sans", *(name for name in WIDE_FONTS if name in fontManager.get_font_names())]

    def write(x: float, y: float, text: str, color: str = INK, **options) -> None:
        options |= {"size": TEXT_SIZE, "family": fonts, "va": "top", "transform": None, "parse_math": False}
        figure.text(x, height - y, text, color=color, **options)

    for left, title in zip((MARGIN, *lefts), ("prompt", *columns)):
        write(left, MARGIN, title, weight="bold")
    for row, (lines, caption) in enumerate(texts):
        top = HEADER_HEIGHT + row * row_height
        for number, line in enumerate(lines):
            write(MARGIN, top + number * LINE_HEIGHT, line)
        write(MARGIN, top + len(lines) * LINE_HEIGHT, caption, ACCENT)
        for column, left in zip(columns.values(), lefts):
            for place, image in enumerate(column[row]):
                figure.figimage(image, left + place * cell_width, height - top - image.height, origin="upper")
    return figure
