"""Conversion of frames to Qwen2-VL patches, bit-identical to the originals of VideoAlign and HPSv3.

    sample frames -> resize (bicubic, antialiased, rounded to uint8) -> normalize -> patches

VideoAlign samples 2 frames per second, so a wrong frame rate changes its score. It resizes by
torch, HPSv3 by Pillow.
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from torch import Tensor

from hyvideo.data.videos import round_through

PATCH = 14  # pixels
MERGE = 2  # patches along each side that become one token
TEMPORAL_PATCH = 2  # frames
FACTOR = PATCH * MERGE
MIN_PIXELS = 128 * FACTOR**2
MIN_FRAMES, MAX_FRAMES = 4, 768


def frame_indices(
    num_frames: int, video_fps: float, *, fps: float = 2.0, num_sampled: int | None = None
) -> list[int]:
    """Return the indices of an even number of evenly spaced frames, including the first and the
    last.

    Samples ``fps`` frames per second from a video with ``video_fps``, or ``num_sampled`` frames in
    total if given.
    """
    if num_frames < TEMPORAL_PATCH:
        raise ValueError(
            f"a video needs at least {TEMPORAL_PATCH} frames to be scored, got {num_frames}"
        )
    if num_sampled is None:
        most = min(MAX_FRAMES, num_frames) // TEMPORAL_PATCH * TEMPORAL_PATCH
        num_sampled = min(max(num_frames / video_fps * fps, MIN_FRAMES), most)
    # Python's round rounds halves to even, as the original does.
    count = min(round(num_sampled / TEMPORAL_PATCH) * TEMPORAL_PATCH, num_frames)
    return torch.linspace(0, num_frames - 1, count).round().long().tolist()


def resize(frames: Tensor, *, max_pixels: int, min_pixels: int = MIN_PIXELS) -> Tensor:
    """Resize frames to the nearest size with sides that are multiples of 28 and an area within the
    bounds.

    Frames that are enlarged to the lower bound may exceed the upper bound. Frames as floats in [0,
    255] keep their gradient and are rounded like uint8 frames. Shape: uint8 or float (frames, 3, height,
    width).
    """
    size = _size_within(frames, min_pixels, max_pixels)
    if size == tuple(frames.shape[-2:]):
        return frames
    return _resize_by_torch(frames, size)


def resize_by_pillow(frames: Tensor, *, max_pixels: int, min_pixels: int) -> Tensor:
    """Resize frames on the CPU like `resize`, with Pillow's bicubic filter.

    Frames as floats get Pillow's values and the gradient of `resize`, whose values differ by about
    a level. Shape: uint8 or float (frames, 3, height, width).
    """
    height, width = _size_within(frames, min_pixels, max_pixels)
    if (height, width) == tuple(frames.shape[-2:]):
        return frames
    pictures = []
    for frame in frames.detach().to(torch.uint8).permute(0, 2, 3, 1).numpy():
        resized = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
        pictures.append(torch.from_numpy(np.array(resized)))
    values = torch.stack(pictures).permute(0, 3, 1, 2)
    if not frames.is_floating_point():
        return values
    differentiable = _resize_by_torch(frames, (height, width))
    return values + (differentiable - differentiable.detach())


def _size_within(frames: Tensor, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize(
        *frames.shape[-2:], factor=FACTOR, min_pixels=min_pixels, max_pixels=max_pixels
    )


def _resize_by_torch(frames: Tensor, size: tuple[int, int]) -> Tensor:
    resized = F.interpolate(
        frames.float(), size, mode="bicubic", align_corners=False, antialias=True
    )
    return round_through(resized.clamp(0, 255)).to(frames.dtype)


def patches(frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return normalized patches, and the number of patches along time, height and width.

    Frames as floats in [0, 255] keep their gradient and get the same values. Shape: uint8 or float
    (frames, 3, height, width) to float32 (patches, 3 * 2 * 14 * 14), with the patches of a token
    adjacent.
    """
    if len(frames) % TEMPORAL_PATCH:
        frames = torch.cat([frames, frames[-1:]])
    if frames.is_floating_point():
        values = _normalized(frames)
    else:
        table = _normalized_levels().to(frames.device)
        values = torch.stack(
            [table[channel][frames[:, channel].long()] for channel in range(3)], dim=1
        )
    tokens = rearrange(
        values,
        # m: patches in a token, p: pixels in a patch
        "(t pt) c (h mh ph) (w mw pw) -> (t h w mh mw) (c pt ph pw)",
        pt=TEMPORAL_PATCH,
        mh=MERGE,
        mw=MERGE,
        ph=PATCH,
        pw=PATCH,
    )
    return tokens, (
        len(frames) // TEMPORAL_PATCH,
        frames.shape[2] // PATCH,
        frames.shape[3] // PATCH,
    )


@functools.cache
def _normalized_levels() -> Tensor:
    """Return the normalized values of all levels. Shape: (3, 256)."""
    levels = torch.arange(256, dtype=torch.float32).expand(1, 3, 1, 256)
    return _normalized(levels)[0, :, 0]


def _normalized(frames: Tensor) -> Tensor:
    """Return (level / 255 - mean) / std per channel, in the original's precisions.

    Shape: float (frames, 3, height, width).
    """
    # Qwen2-VL was trained with these
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    mean = torch.tensor(OPENAI_CLIP_MEAN, dtype=torch.float32, device=frames.device).view(3, 1, 1)
    std = torch.tensor(OPENAI_CLIP_STD, dtype=torch.float32, device=frames.device).view(3, 1, 1)
    return ((frames.double() * (1 / 255)).float() - mean) / std
