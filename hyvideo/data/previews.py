"""Small versions of video files for web pages. Imports no torch."""

import io
import os

from hyvideo.data.video_files import as_rate, encode, opened

PREVIEW_SIDE = 256  # pixels on the shorter side of a preview, at most
PREVIEW_CRF = "28"  # quality of a preview; 0 is lossless, 51 the worst
PREVIEW_BUFFER = 1.0  # seconds over which the limited bit rate of a preview is averaged
# of WebP, from 0 to 100; the first whose picture is small enough is used
POSTER_QUALITIES = (60, 30, 10)


def encode_preview(path: str | os.PathLike, *, max_bytes: int) -> bytes:
    """Return a video file as a small mp4 with all its frames, 256 pixels on the shorter side, for a
    web page.

    It has at most about ``max_bytes``. Only one frame of the file is in memory at a time. Raises
    like `read_video`.
    """
    with opened(path) as (header, pictures):
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
        return encode(small, as_rate(header.fps), height=height, width=width, options=options)


def encode_poster(path: str | os.PathLike, *, max_bytes: int) -> bytes:
    """Return the first frame of a video file as a WebP picture of at most ``max_bytes``, for a web
    page.

    It has at most 256 pixels on the shorter side. It is empty if no quality is small enough. Raises
    like `read_video`.
    """
    with opened(path) as (_, pictures):
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
