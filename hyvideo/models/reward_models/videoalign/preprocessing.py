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
# CLIP's, which Qwen2-VL was trained with
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def frame_indices(num_frames: int, video_fps: float, *, fps: float = 2.0, num_sampled: int | None = None) -> list[int]:
    """Indices of the frames that are looked at: an even number, spread evenly, the first and the last among them.

    Args:
        video_fps: Frames per second of the clip.
        fps: Frames per second to look at.
        num_sampled: A number of frames, in place of ``fps``.

    Raises:
        ValueError: The clip has less than two frames, or fps is not positive.
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


def resized(height: int, width: int, *, max_pixels: int, min_pixels: int = MIN_PIXELS) -> tuple[int, int]:
    """The size nearest to an image's whose sides are multiples of 28 and whose area lies within the bounds.

    The original does not look at the upper bound again after the lower one has enlarged an image; nor does this.
    """
    rounded = [max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width)]
    if math.prod(rounded) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rounded = [math.floor(side / shrink / FACTOR) * FACTOR for side in (height, width)]
    elif math.prod(rounded) < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rounded = [math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width)]
    return rounded[0], rounded[1]


def resize(frames: Tensor, *, max_pixels: int, min_pixels: int = MIN_PIXELS) -> Tensor:
    """Frames in a size that the model takes. Shape: uint8 (frames, 3, height, width)."""
    size = resized(*frames.shape[-2:], max_pixels=max_pixels, min_pixels=min_pixels)
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
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)
    rows = [(levels - np.float32(mean)) / np.float32(std) for mean, std in zip(MEAN, STD)]
    return torch.from_numpy(np.stack(rows))
