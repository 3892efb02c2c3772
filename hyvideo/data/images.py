"""The first frame for image-to-video: an image file, resized and cropped to the nearest video size
of the model.
"""

import math
import os
import re
import struct
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from hyvideo.files.text import quote

if TYPE_CHECKING:  # images are checked before anything slow is imported
    from torch import Tensor

# side of a square of the same area, in pixels
RESOLUTIONS = {"360p": 480, "480p": 640, "720p": 960, "1080p": 1440}
STRIDE = 16  # video pixels per latent pixel
MAX_RATIO = 4  # longer side / shorter side of a bucket
# not all of Pillow's formats, some of which run programs (EPS)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")

# What Pillow's decoders of FORMATS raise for a corrupted file.
_UNREADABLE = (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError)
_ASPECT_RATIO = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,9})?):([0-9]{1,5}(?:\.[0-9]{1,9})?)")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to 8-bit RGB, ignoring color profiles.

    Transparent pixels become white, as on a web page. 16-bit gray values are divided by 256; Pillow
    would clip them.
    """
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_image(path: str | os.PathLike) -> Image.Image:
    """Read an image file, or the first frame of an animation, as RGB, rotated by EXIF.

    ValueError if it is unusable.
    """
    try:
        with Image.open(path, formats=FORMATS) as file:
            return to_rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError as error:
        raise ValueError(
            f"an image must be a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, got "
            f"{quote(path)}; convert it to PNG"
        ) from error
    except _UNREADABLE as error:
        raise ValueError(
            f"an image must be a readable {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file, got "
            f"{quote(path)} ({error})"
        ) from error


def bucket_sizes(resolution: str) -> list[tuple[int, int]]:
    """Return the sizes (height, width) in pixels that the model was trained on at a resolution,
    tallest first.

    In cells of 16 x 16 pixels, with n = (side / 16)^2 cells in the square, h x w is a bucket if
    h * w <= n < (h + 1) * (w + 1) and the longer side is at most 4 times the shorter.
    """
    num_cells = (RESOLUTIONS[resolution] // STRIDE) ** 2
    return [
        (STRIDE * h, STRIDE * w)
        # h <= MAX_RATIO * w and h * w <= num_cells
        for h in range(math.isqrt(MAX_RATIO * num_cells), 0, -1)
        for w in range(max(1, num_cells // (h + 1)), num_cells // h + 1)
        if max(h, w) <= MAX_RATIO * min(h, w)
    ]


def nearest_size(height: float, width: float, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the size (height, width) whose ratio height / width is nearest to the image's, by
    absolute difference.

    The sizes' ratios are rounded to 5 digits, which decides near ties; among equal ratios the first
    size is chosen. diffusers considers only ratios between the image's and the square's, so half of
    the images get another bucket.
    """
    return min(sizes, key=lambda size: abs(round(size[0] / size[1], 5) - height / width))


def larger_size(height: int, width: int, resolution: str) -> tuple[int, int]:
    """Return the bucket (height, width) of a higher resolution whose ratio width / height is
    nearest to a bucket's.

    As in the original, the ratios are not rounded, and of two equally near buckets the wider one is
    chosen.
    """
    return min(
        reversed(bucket_sizes(resolution)), key=lambda size: abs(size[1] / size[0] - width / height)
    )


def size_of_aspect_ratio(aspect_ratio: str, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the size (height, width) for a ratio such as ``16:9``.

    Raises ValueError if malformed or beyond 4:1.
    """
    match = _ASPECT_RATIO.fullmatch(aspect_ratio)
    width = float(match[1]) if match else 0.0
    height = float(match[2]) if match else 0.0
    if not 0 < max(width, height) <= MAX_RATIO * min(width, height):
        raise ValueError(
            f"aspect ratio must be width:height from 1:{MAX_RATIO} to {MAX_RATIO}:1, such as 16:9, "
            f"got {quote(aspect_ratio)}"
        )
    return nearest_size(height, width, sizes)


def fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize an RGB image (Lanczos) to the smallest size that covers height x width, and crop it to
    its center.

    ``scale = max(width / w, height / h)`` in Python floats; the covering size is
    ``round(w scale) x round(h scale)`` and the crop starts at ``round((covering - frame) / 2)``,
    halves to even.
    """
    scale = max(width / image.width, height / image.height)
    covering = round(image.width * scale), round(image.height * scale)
    left = round((covering[0] - width) / 2)
    top = round((covering[1] - height) / 2)
    resized = image.resize(covering, Image.Resampling.LANCZOS)
    return resized.crop((left, top, left + width, top + height))


def pad(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize an RGB image (Lanczos) to the largest size within height x width, with black borders."""
    return ImageOps.pad(image, (width, height), Image.Resampling.LANCZOS, color="black")


def to_pixels(image: Image.Image) -> "Tensor":
    """Return the VAE's input: 2 x / 255 - 1, in [-1, 1]. Shape: float32 (3, height, width)."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255 * 2 - 1
