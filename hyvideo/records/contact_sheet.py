"""A contact sheet of what training changed: the same prompts and seeds before and after, as one PNG."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from hyvideo.data.videos import check_clip

WHITE, INK, ACCENT = "#ffffff", "#1f2328", "#0b66c3"
FRAME_EDGE, RULE = "#d0d7de", "#e6e9ed"

MARGIN = 24  # pixels, as all lengths here
CAPTION_WIDTH = 230
CAPTION_GAP = 26  # between the captions and the first frame
FRAME_GAP = 5
GUTTER = 44  # between the last frame before and the first after
ROW_PADDING = 13  # above and below a row's frames
HEADER_HEIGHT = 30
TEXT_SIZE, HEADER_SIZE = 15, 17
LINE_HEIGHT = 20
MAX_PROMPT_LINES = 7


class Fonts(NamedTuple):
    text: ImageFont.FreeTypeFont
    header: ImageFont.FreeTypeFont


class Cells(NamedTuple):
    """Where frames lie: a grid of equal cells for each half of the sheet."""

    width: int
    height: int
    columns_before: int
    columns_after: int

    def left(self, half: int, column: int) -> int:
        """The left edge of a column in the half before (0) or after (1)."""
        left = MARGIN + CAPTION_WIDTH + CAPTION_GAP + column * (self.width + FRAME_GAP)
        return left + half * (self.half_width(0) + GUTTER)

    def half_width(self, half: int) -> int:
        columns = (self.columns_before, self.columns_after)[half]
        return columns * (self.width + FRAME_GAP) - FRAME_GAP


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


def split_word(word: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Pieces of a word that each fit the width: for long names and languages written without spaces."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and font.getlength(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def wrap(text: str, font: ImageFont.FreeTypeFont, width: int, max_lines: int) -> list[str]:
    """Lines of text that fit the width in pixels; an ellipsis ends the last where text is left over."""
    lines = [""]
    pieces = [piece for word in text.split() for piece in split_word(word, font, width)]
    for piece in pieces:
        longer = f"{lines[-1]} {piece}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(piece)
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while last and font.getlength(f"{last}...") > width:
        last = last[:-1].rstrip()
    return [*lines[: max_lines - 1], f"{last}..."]


def load_fonts(font_file: str | os.PathLike | None) -> Fonts:
    if font_file is None:
        return Fonts(ImageFont.load_default(size=TEXT_SIZE), ImageFont.load_default(size=HEADER_SIZE))
    name = os.fspath(font_file)
    return Fonts(ImageFont.truetype(name, TEXT_SIZE), ImageFont.truetype(name, HEADER_SIZE))


def check_rows(
    prompts: Sequence[str], before: Sequence[Tensor], after: Sequence[Tensor], captions: Sequence[str] | None
) -> None:
    """Raises ValueError unless each prompt has a clip before, a clip after and, if given, a caption."""
    counts = {"prompts": len(prompts), "before": len(before), "after": len(after)}
    if captions is not None:
        counts["captions"] = len(captions)
    if len(set(counts.values())) != 1 or not prompts:
        raise ValueError(f"a contact sheet needs as many of each and at least one row, got {counts}")
    for clip in (*before, *after):
        check_clip(clip)


def draw_headers(draw: ImageDraw.ImageDraw, cells: Cells, fonts: Fonts) -> None:
    base = MARGIN + HEADER_HEIGHT
    draw.text((MARGIN, base - 12), "prompt", INK, font=fonts.header, anchor="ls")
    draw.line((MARGIN, base - 2, MARGIN + CAPTION_WIDTH, base - 2), INK, width=2)
    for half, title in enumerate(("before", "after")):
        left, width = cells.left(half, 0), cells.half_width(half)
        draw.text((left + width / 2, base - 12), title, INK, font=fonts.header, anchor="ms")
        draw.line((left, base - 2, left + width - 1, base - 2), INK, width=2)


def draw_caption(
    draw: ImageDraw.ImageDraw,
    lines: list[str],
    score: str | None,
    *,
    top: float,
    font: ImageFont.FreeTypeFont,
) -> None:
    """The wrapped prompt with the score under it, from ``top`` downwards."""
    for index, line in enumerate(lines):
        draw.text((MARGIN, top + (index + 0.5) * LINE_HEIGHT), line, INK, font=font, anchor="lm")
    if score is not None:
        draw.text((MARGIN, top + (len(lines) + 0.75) * LINE_HEIGHT), score, ACCENT, font=font, anchor="lm")


def draw_frames(sheet: Image.Image, frames: list[Image.Image], cells: Cells, *, half: int, top: int) -> None:
    """One half of a row; a thin edge keeps clips with a white background apart."""
    draw = ImageDraw.Draw(sheet)
    for column, frame in enumerate(frames):
        left = cells.left(half, column) + (cells.width - frame.width) // 2
        upper = top + (cells.height - frame.height) // 2
        draw.rectangle((left - 1, upper - 1, left + frame.width, upper + frame.height), outline=FRAME_EDGE)
        sheet.paste(frame, (left, upper))


def save_png(path: Path, sheet: Image.Image) -> None:
    """Written aside and renamed, so that the picture is complete or absent."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}.part.png")
    try:
        sheet.save(aside, "PNG", optimize=True)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def before_after(
    path: str | os.PathLike,
    prompts: Sequence[str],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    *,
    num_frames: int = 5,
    captions: Sequence[str] | None = None,
    frame_height: int = 96,
    font_file: str | os.PathLike | None = None,
) -> None:
    """Writes a PNG, a row for each prompt: its text, frames before training and after, time to the right.

    Args:
        before, after: a clip for each prompt, from the same seed; uint8 (frames, 3, height, width), any size.
        captions: a short line under each prompt, such as its scores: "0.81 -> 1.42".
        frame_height: in pixels; smaller clips are enlarged by an integer, larger ones shrunk.
        font_file: a TrueType font. The default font has Latin letters only: Chinese prompts need another.

    Raises ValueError for lists of different lengths and for what is not a clip. The folder must exist.
    """
    check_rows(prompts, before, after, captions)
    if num_frames < 1 or frame_height < 1:
        raise ValueError(f"num_frames and frame_height must be at least 1, got {num_frames} and {frame_height} pixels")
    fonts = load_fonts(font_file)
    rows = [
        tuple([fit_frame(frame, frame_height) for frame in even_frames(clip, num_frames)] for clip in pair)
        for pair in zip(before, after)
    ]
    images = [image for row in rows for half in row for image in half]
    cells = Cells(
        width=max(image.width for image in images),
        height=max(image.height for image in images),
        columns_before=max(len(half) for half, _ in rows),
        columns_after=max(len(half) for _, half in rows),
    )
    texts = [wrap(prompt, fonts.text, CAPTION_WIDTH, MAX_PROMPT_LINES) for prompt in prompts]
    score_height = 0 if captions is None else 1.25 * LINE_HEIGHT
    text_heights = [len(lines) * LINE_HEIGHT + score_height for lines in texts]
    row_heights = [max(cells.height, round(height)) + 2 * ROW_PADDING for height in text_heights]

    width = cells.left(1, 0) + cells.half_width(1) + MARGIN
    height = MARGIN + HEADER_HEIGHT + sum(row_heights) + MARGIN // 2
    sheet = Image.new("RGB", (width, height), WHITE)
    draw = ImageDraw.Draw(sheet)
    draw_headers(draw, cells, fonts)
    top = MARGIN + HEADER_HEIGHT
    for index, (row, row_height) in enumerate(zip(rows, row_heights)):
        if index:
            draw.line((MARGIN, top, width - MARGIN - 1, top), RULE)
        score = None if captions is None else captions[index]
        text_top = top + (row_height - text_heights[index]) / 2
        draw_caption(draw, texts[index], score, top=text_top, font=fonts.text)
        for half, frames in enumerate(row):
            draw_frames(sheet, frames, cells, half=half, top=top + (row_height - cells.height) // 2)
        top += row_height
    save_png(Path(path), sheet)
