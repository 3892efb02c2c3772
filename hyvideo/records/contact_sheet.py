"""A contact sheet of what training changed: the same prompts and seeds before and after, as one PNG."""

import os
import textwrap
import warnings
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from hyvideo.data.outside import replacing
from hyvideo.data.videos import check_clip

INK, ACCENT, FRAME_EDGE, RULE = "#1f2328", "#0b66c3", "#d0d7de", "#e6e9ed"
DPI = 72  # a point is a pixel, and all lengths here are in pixels
MARGIN, HEADER_HEIGHT = 24, 30
CAPTION_WIDTH, CAPTION_GAP = 230, 26  # the column of the prompts, and what is between it and the first frame
FRAME_GAP, GUTTER = 5, 44  # between frames, and between the last frame before and the first after
ROW_PADDING = 13  # above and below a row's frames
TEXT_SIZE, HEADER_SIZE, LINE_HEIGHT = 14, 16, 20
MAX_PROMPT_LINES, LINE_LENGTH = 7, 28  # lines, characters
WIDE = "\u1100"  # from here on, letters are about twice as wide
WIDE_FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")


def before_after(
    path: str | os.PathLike,
    prompts: Sequence[str],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    *,
    num_frames: int = 5,
    captions: Sequence[str] | None = None,
    frame_height: int = 96,
) -> None:
    """Writes a PNG, a row for each prompt: its text, frames before training and after, time to the right.

    Args:
        before, after: A clip for each prompt, from the same seed; uint8 (frames, 3, height, width), any size.
        captions: A short line under each prompt, such as its scores: "0.81 -> 1.42".
        frame_height: In pixels; smaller clips are enlarged by an integer, larger ones shrunk.

    Raises ValueError for lists of different lengths and for what is not a clip. The folder must exist.
    """
    captions = [""] * len(prompts) if captions is None else captions
    counts = {"prompts": len(prompts), "before": len(before), "after": len(after), "captions": len(captions)}
    if len(set(counts.values())) != 1 or not prompts:
        raise ValueError(f"a contact sheet needs as many of each and at least one row, got {counts}")
    if num_frames < 1 or frame_height < 1:
        raise ValueError(f"num_frames and frame_height must be at least 1, got {num_frames} and {frame_height} pixels")
    for clip in (*before, *after):
        check_clip(clip)
    halves = [
        [[fit_frame(frame, frame_height) for frame in even_frames(clip, num_frames)] for clip in clips]
        for clips in (before, after)
    ]
    texts = [(wrap(prompt), caption) for prompt, caption in zip(prompts, captions)]
    with replacing(path) as aside, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # once a letter; the picture shows a box
        _draw(texts, halves).savefig(aside, format="png", dpi=DPI)


def even_frames(video: Tensor, num_frames: int) -> Tensor:
    """Evenly spaced frames with the first and the last; all of a shorter clip; the middle one for one.

    Shape: (min(num_frames, frames), channels, height, width).
    """
    if num_frames == 1:
        return video[len(video) // 2 :][:1]
    num_frames = min(num_frames, len(video))
    return video[torch.linspace(0, len(video) - 1, num_frames).round().long()]


def fit_frame(frame: Tensor, frame_height: int) -> Image.Image:
    """A frame at most ``frame_height`` high: enlarged by an integer with sharp pixels, or shrunk.

    ``frame``: uint8 (channels, height, width).
    """
    image = Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy())
    factor = frame_height // image.height
    if factor >= 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    width = max(1, round(image.width * frame_height / image.height))
    return image.resize((width, frame_height), Image.Resampling.LANCZOS)


def wrap(text: str) -> list[str]:
    """Lines of a prompt for its column; an ellipsis ends the last where text is left over."""
    length = LINE_LENGTH // 2 if any(letter >= WIDE for letter in text) else LINE_LENGTH
    return textwrap.wrap(text, length, max_lines=MAX_PROMPT_LINES, placeholder="...")


def _draw(texts: list[tuple[list[str], str]], halves: list[list[list[Image.Image]]]):
    """The figure: prompts and captions by row, and frames by half, row and time."""
    from matplotlib.figure import Figure  # here, as it is slow to import
    from matplotlib.font_manager import fontManager
    from matplotlib.patches import Rectangle

    images = [image for half in halves for row in half for image in row]
    cell_width, cell_height = max(image.width for image in images), max(image.height for image in images)
    widths = [max(map(len, half)) * (cell_width + FRAME_GAP) - FRAME_GAP for half in halves]
    lefts = [MARGIN + CAPTION_WIDTH + CAPTION_GAP, MARGIN + CAPTION_WIDTH + CAPTION_GAP + widths[0] + GUTTER]
    text_heights = [(len(lines) + bool(caption)) * LINE_HEIGHT for lines, caption in texts]
    row_heights = [max(cell_height, height) + 2 * ROW_PADDING for height in text_heights]
    width, height = lefts[1] + widths[1] + MARGIN, MARGIN + HEADER_HEIGHT + sum(row_heights) + MARGIN // 2
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    fonts = ["DejaVu Sans", *(name for name in WIDE_FONTS if name in fontManager.get_font_names())]

    def write(x: float, y: float, text: str, size: float = TEXT_SIZE, **options) -> None:
        options = {"color": INK, "fontfamily": fonts, "va": "center"} | options
        figure.text(x, height - y, text, size=size, transform=None, parse_math=False, **options)

    def fill(x: float, y: float, box_width: float, box_height: float, color: str) -> None:
        box = Rectangle((x, height - y - box_height), box_width, box_height, transform=None, color=color, linewidth=0)
        figure.add_artist(box)

    columns = [(MARGIN, CAPTION_WIDTH, "prompt"), (lefts[0], widths[0], "before"), (lefts[1], widths[1], "after")]
    for left, column_width, title in columns:
        write(left, MARGIN + HEADER_HEIGHT - 18, title, HEADER_SIZE)
        fill(left, MARGIN + HEADER_HEIGHT - 4, column_width, 2, INK)
    top = MARGIN + HEADER_HEIGHT
    for row, (lines, caption) in enumerate(texts):
        if row:
            fill(MARGIN, top, width - 2 * MARGIN, 1, RULE)
        center = top + row_heights[row] / 2
        for number, line in enumerate([*lines, caption] if caption else lines):
            color = ACCENT if number == len(lines) else INK
            write(MARGIN, center - text_heights[row] / 2 + (number + 0.5) * LINE_HEIGHT, line, color=color)
        for half, left in zip(halves, lefts):
            for column, image in enumerate(half[row]):
                x = left + column * (cell_width + FRAME_GAP) + (cell_width - image.width) // 2
                y = round(center) - image.height // 2
                fill(x - 1, y - 1, image.width + 2, image.height + 2, FRAME_EDGE)
                figure.figimage(image, xo=x, yo=height - y - image.height, zorder=2, origin="upper")
        top += row_heights[row]
    return figure
