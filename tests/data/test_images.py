"""Tests of first frames for image-to-video, against Pillow and diffusers."""

import random
import re
import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers.pipelines.hunyuan_video1_5 import image_processor as diffusers_images
from PIL import Image

from hyvideo.data.images import (
    RESOLUTIONS,
    bucket_sizes,
    fit,
    nearest_size,
    read_image,
    size_of_aspect_ratio,
    to_pixels,
)

# EXIF orientation -> Pillow's rotation
ROTATIONS = {1: None, 3: "ROTATE_180", 6: "ROTATE_270", 8: "ROTATE_90"}


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    )


def random_sizes(count: int) -> list[tuple[int, int]]:
    numbers = random.Random(0)
    return [(numbers.randint(100, 3000), numbers.randint(100, 3000)) for _ in range(count)]


def png_header(width: int, height: int) -> bytes:
    """Return a short PNG whose header declares this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


# Files


@pytest.mark.parametrize("extension", ["png", "webp"])
def test_lossless_files_are_read_exactly(tmp_path, extension):
    image = noise(5, 7)
    image.save(tmp_path / f"a.{extension}", lossless=True)
    read = read_image(str(tmp_path / f"a.{extension}"))
    assert read.mode == "RGB" and np.array_equal(read, image)


@pytest.mark.parametrize("orientation", ROTATIONS)
def test_images_are_rotated_by_their_exif_orientation(tmp_path, orientation):
    image, exif = noise(5, 7), Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    turn = ROTATIONS[orientation]
    upright = image.transpose(Image.Transpose[turn]) if turn else image
    assert np.array_equal(read_image(tmp_path / "a.png"), upright)


def test_16_bit_gray_keeps_its_range(tmp_path):
    Image.fromarray(np.array([[0, 256, 0x8000, 0xFFFF]], np.uint16)).save(tmp_path / "a.png")
    assert np.array(read_image(tmp_path / "a.png"))[0].tolist() == [
        [grey] * 3 for grey in (0, 1, 128, 255)
    ]


def test_truncated_files_raise_an_error_that_names_them(tmp_path):
    whole, cut = tmp_path / "whole.jpg", tmp_path / "cut.jpg"
    noise(16, 16).save(whole)
    data = whole.read_bytes()
    for length in range(0, len(data) * 3 // 4, 7):
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut.jpg"):
            read_image(cut)


@pytest.mark.parametrize("width, height", [(0, 5), (8193, 8192)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_empty_and_huge_images_are_rejected_from_the_header(tmp_path, width, height):
    (tmp_path / "a.png").write_bytes(png_header(width, height))
    with pytest.raises(ValueError, match="a.png"):
        read_image(tmp_path / "a.png")


def test_other_files_raise_an_error_that_names_them(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    noise(4, 4).save(tmp_path / "a.tiff")
    for name in ("missing.png", "text.png", "a.tiff", ""):
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
            read_image(tmp_path / name)


# Buckets


@pytest.mark.parametrize("resolution, count", [("480p", 121), ("720p", 181)])
def test_buckets_match_the_original(resolution, count):
    sizes = bucket_sizes(resolution)
    assert len(sizes) == len(set(sizes)) == count
    assert sizes == diffusers_images.generate_crop_size_list(RESOLUTIONS[resolution])


def test_the_nearest_bucket_has_the_nearest_rounded_ratio():
    sizes = {
        size: Fraction(round(size[0] / size[1] * 10**5), 10**5) for size in bucket_sizes("480p")
    }
    for height, width in random_sizes(150):
        chosen = abs(
            sizes[nearest_size(height, width, bucket_sizes("480p"))] - Fraction(height, width)
        )
        assert chosen == min(abs(ratio - Fraction(height, width)) for ratio in sizes.values())


@pytest.mark.parametrize(
    "aspect_ratio, resolution, size",
    [("16:9", "480p", (480, 848)), ("4:1", "480p", (320, 1280))],
)
def test_aspect_ratios_give_the_known_sizes(aspect_ratio, resolution, size):
    assert size_of_aspect_ratio(aspect_ratio, bucket_sizes(resolution)) == size


# Pixels


# Computed with exact fractions: height and width of image, frame and covering image, then top and
# left of the crop. The second has a half, 764.5, which floating point rounds to 764.5000000000001.
COVERINGS = {
    (101, 64, 32, 32): (50, 32, 9, 0),
    (640, 695, 704, 560): (704, 765, 0, 102),
    (1080, 1920, 480, 848): (480, 853, 0, 2),
    (1024, 1024, 640, 640): (640, 640, 0, 0),
    (500, 2400, 320, 1280): (320, 1536, 0, 128),
    (333, 696, 560, 704): (560, 1170, 0, 233),
    (571, 643, 352, 1104): (980, 1104, 314, 0),
    (740, 245, 336, 1152): (3480, 1152, 1572, 0),
    (486, 821, 480, 816): (483, 816, 2, 0),
    (189, 126, 768, 512): (768, 512, 0, 0),
}


@pytest.mark.parametrize("sizes", COVERINGS)
def test_fit_matches_the_originals_resize_and_crop(sizes):
    (height, width, *frame), (covering_height, covering_width, top, left) = sizes, COVERINGS[sizes]
    image = noise(height, width)
    covering = np.array(image.resize((covering_width, covering_height), Image.Resampling.LANCZOS))
    expected = covering[top : top + frame[0], left : left + frame[1]]
    assert expected.shape == (*frame, 3) and np.array_equal(fit(image, *frame), expected)


@pytest.mark.parametrize(
    "height, width, is_same",
    [(90, 160, True), (80, 123, False)],
)
def test_fit_equals_diffusers_unless_diffusers_truncates(height, width, is_same):
    image, frame = noise(height, width), (80, 80)
    processor = diffusers_images.HunyuanVideo15ImageProcessor(do_resize=False)
    theirs = processor.resize(image, height=frame[0], width=frame[1], resize_mode="crop")
    assert np.array_equal(fit(image, *frame), theirs) == is_same


def test_pixels_equal_those_of_diffusers():
    image = noise(96, 160)
    processor = diffusers_images.HunyuanVideo15ImageProcessor(do_resize=False)
    pixels = to_pixels(image)
    assert pixels.dtype == torch.float32 and pixels.shape == (3, 96, 160)
    assert torch.equal(pixels, processor.preprocess(image, height=96, width=160)[0])
