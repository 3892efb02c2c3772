"""The first frame of image-to-video: an image file, cropped to a size of the model.

A model makes clips of few sizes, or of one area per resolution in many shapes ("buckets"). An image goes to the size
whose shape is nearest to its own.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from hyvideo.data.outside import file_problem, shown

if TYPE_CHECKING:  # images are checked before anything slow is imported
    from torch import Tensor

RESOLUTIONS = {"360p": 480, "480p": 640, "720p": 960, "1080p": 1440}  # pixels, side of the square of equal area
STRIDE = 16  # pixels of the clip per latent pixel
MAX_RATIO = 4  # longer side / shorter side of a bucket
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # Pillow knows more, some of which run programs (EPS)
MAX_BYTES = 1 << 28  # of a file
MAX_PIXELS = 1 << 26  # of an image, as stored and while it is resized

# All that Pillow's decoders of FORMATS raise for a damaged file; the warning is made an error below.
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
_ASPECT_RATIO = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,9})?):([0-9]{1,5}(?:\.[0-9]{1,9})?)")


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of an image in any mode; colour profiles are not applied.

    What is transparent becomes white, as on the page where the image was seen; without its alpha it would show
    colours that nobody has seen, mostly black. 16-bit grey is divided by 256, where Pillow would clip it to white.
    """
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_image(path: str | os.PathLike) -> Image.Image:
    """An image file as RGB, turned upright by its EXIF orientation; of an animation the first frame.

    Raises ValueError for a file that is missing, damaged, of another format than ``FORMATS`` or of more than
    ``MAX_PIXELS``. The size is read from the header, before anything is decoded.
    """
    with _opened(path) as file:
        return to_rgb(ImageOps.exif_transpose(file))


@contextmanager
def _opened(path: str | os.PathLike) -> Iterator[Image.Image]:
    """The image file with its header read; what goes wrong inside is one ValueError that names it."""
    try:
        if problem := file_problem(path, MAX_BYTES):
            raise ValueError(problem)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as file:
                if not 0 < file.width * file.height <= MAX_PIXELS:
                    raise ValueError(f"it has {file.width} x {file.height} pixels")
                yield file
    except _UNREADABLE as error:
        raise ValueError(
            f"an image must be a readable {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file of at most "
            f"{MAX_PIXELS} pixels, got {shown(path)} ({error})"
        ) from error


def check_image(path: str | os.PathLike) -> None:
    """Raises ValueError as `read_image`, from the header alone: fast enough for all images of a long prompts file."""
    with _opened(path):
        pass


def bucket_sizes(resolution: str) -> list[tuple[int, int]]:
    """Sizes (height, width) in pixels that the model was trained on at a resolution, the tallest first.

    With cells of 16 x 16 pixels, n = (side / 16)^2 of them in the square, h x w cells are a bucket where
    h * w <= n < (h + 1) * (w + 1) and the longer side is at most 4 times the shorter.
    """
    if resolution not in RESOLUTIONS:
        raise ValueError(f"resolution must be one of {', '.join(RESOLUTIONS)}, got {resolution!r}")
    num_cells = (RESOLUTIONS[resolution] // STRIDE) ** 2
    return [
        (STRIDE * h, STRIDE * w)
        for h in range(num_cells, 0, -1)
        for w in range(max(1, num_cells // (h + 1)), num_cells // h + 1)
        if max(h, w) <= MAX_RATIO * min(h, w)
    ]


def nearest_size(height: float, width: float, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """The size (height, width) whose height / width is nearest to that of an image, by absolute difference.

    Ratios of sizes are rounded to 5 digits, which settles what is nearly a tie; of equal ones the first is taken, the
    tallest of buckets. An image beyond 4:1 gets the bucket at that end and loses what is over. diffusers rounds so too,
    but looks on the square's side of the image's ratio only, and so chooses another bucket for every second image.
    """
    return min(sizes, key=lambda size: abs(round(size[0] / size[1], 5) - height / width))


def size_of_aspect_ratio(aspect_ratio: str, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """The size (height, width) for a ratio such as ``16:9``; ValueError for another form, and beyond 4:1."""
    match = _ASPECT_RATIO.fullmatch(aspect_ratio)
    width, height = map(float, match.groups()) if match else (0.0, 0.0)
    if not 0 < max(width, height) <= MAX_RATIO * min(width, height):
        rule = f"width:height from 1:{MAX_RATIO} to {MAX_RATIO}:1, such as 16:9"
        raise ValueError(f"aspect ratio must be {rule}, got {shown(aspect_ratio)}")
    return nearest_size(height, width, sizes)


def fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """The RGB image resized (Lanczos) until it just covers height x width, then cropped about its centre to that.

    In Python's floats: ``scale = max(width / w, height / h)``, the covering size is
    ``round(w scale) x round(h scale)``, the crop begins at ``round((covering - frame) / 2)``, halves to even. diffusers
    cuts both down to whole pixels, and its pipeline sees six of ten images scaled or moved by a part of a pixel.
    Raises ValueError for an image so long that it would grow over ``MAX_PIXELS`` on the way.
    """
    scale = max(width / image.width, height / image.height)
    covering = round(image.width * scale), round(image.height * scale)
    assert covering[0] >= width and covering[1] >= height  # w (W / w) is W but for its last bit
    if covering[0] * covering[1] > MAX_PIXELS:
        raise ValueError(
            f"an image of {image.height} x {image.width} pixels is too long for a frame of {height} x {width}; crop it"
        )
    left, top = round((covering[0] - width) / 2), round((covering[1] - height) / 2)
    resized = image.resize(covering, Image.Resampling.LANCZOS)
    return resized.crop((left, top, left + width, top + height))


def to_pixels(image: Image.Image) -> "Tensor":
    """Pixels as the VAE encodes them: 2 x / 255 - 1, in [-1, 1]. Shape: float32 (3, height, width)."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255 * 2 - 1
