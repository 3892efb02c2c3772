"""Frames of a clip to the patches that Qwen2-VL reads, as the original VideoAlign makes them, bit for bit.

    sample 2 frames a second -> resize (bicubic, antialiased, rounded to uint8) -> normalise -> patches

The number of frames depends on the clip's frames per second: a wrong one changes the score.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

PATCH = 14  # pixels
MERGE = 2  # patches along each side that become one token
TEMPORAL_PATCH = 2  # frames
FACTOR = PATCH * MERGE
MIN_PIXELS = 128 * FACTOR**2
MIN_FRAMES, MAX_FRAMES = 4, 768


def frame_indices(num_frames: int, video_fps: float, *, fps: float = 2.0, num_sampled: int | None = None) -> list[int]:
    """Indices of the frames that are looked at: an even number, spread evenly, the first and the last among them.

    Of a clip of ``video_fps`` frames per second ``fps`` are looked at, or ``num_sampled`` in all where that is given.
    """
    if num_frames < TEMPORAL_PATCH:
        raise ValueError(f"a clip needs at least {TEMPORAL_PATCH} frames to be scored, got {num_frames}")
    if not 0 < video_fps < math.inf:
        raise ValueError(f"frames per second of a clip must be positive, got {video_fps}")
    if num_sampled is None:
        most = min(MAX_FRAMES, num_frames) // TEMPORAL_PATCH * TEMPORAL_PATCH
        num_sampled = min(max(num_frames / video_fps * fps, MIN_FRAMES), most)
    # Python rounds halves to even, and so did the original.
    count = min(round(num_sampled / TEMPORAL_PATCH) * TEMPORAL_PATCH, num_frames)
    return torch.linspace(0, num_frames - 1, count).round().long().tolist()


def resize(frames: Tensor, *, max_pixels: int, min_pixels: int = MIN_PIXELS) -> Tensor:
    """Frames in the nearest size whose sides are multiples of 28 and whose area lies within the bounds.

    Shape: uint8 (frames, 3, height, width). The upper bound is not looked at again after the lower one has enlarged.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    size = smart_resize(*frames.shape[-2:], factor=FACTOR, min_pixels=min_pixels, max_pixels=max_pixels)
    if size == tuple(frames.shape[-2:]):
        return frames
    floats = F.interpolate(frames.float(), size, mode="bicubic", align_corners=False, antialias=True)
    return floats.clamp(0, 255).round().to(torch.uint8)


def patches(frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Normalised patches, and how many there are in time, height and width.

    Shape: uint8 (frames, 3, height, width) to float32 (patches, 3 * 2 * 14 * 14), patches of one token together.
    """
    if len(frames) % TEMPORAL_PATCH:
        frames = torch.cat([frames, frames[-1:]])
    table = _normalised_levels().to(frames.device)
    values = torch.stack([table[channel][frames[:, channel].long()] for channel in range(3)], dim=1)
    tokens = rearrange(
        values,
        "(t pt) c (h mh ph) (w mw pw) -> (t h w mh mw) (c pt ph pw)",  # m: patches in a token, p: pixels in a patch
        **{"pt": TEMPORAL_PATCH, "mh": MERGE, "mw": MERGE, "ph": PATCH, "pw": PATCH},
    )
    return tokens, (len(frames) // TEMPORAL_PATCH, frames.shape[2] // PATCH, frames.shape[3] // PATCH)


@functools.cache
def _normalised_levels() -> Tensor:
    """(level / 255 - mean) / std of each channel in the original's precisions. Shape: (3, 256)."""
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD  # which Qwen2-VL was trained with

    levels = (np.arange(256) * (1 / 255)).astype(np.float32)
    rows = [(levels - np.float32(mean)) / np.float32(std) for mean, std in zip(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)]
    return torch.from_numpy(np.stack(rows))
