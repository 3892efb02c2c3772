"""Properties of a video's pixels that change if a run learns over-exposure, saturated color, frozen
motion, grids or blur. Each is a fraction of the full range, on a subset of the frames of long
videos.
"""

from collections.abc import Hashable, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.records.run_files import evenly_spaced

NUM_PAIRS = 16  # of neighboring frames measured
NUM_SHARP_FRAMES = 4
SMALL = 32  # longer side in pixels, for motion
THUMBNAIL = (4, 8, 8)  # frames, height, width; diversity compares thumbnails
LUMA = (0.299, 0.587, 0.114)  # Rec. 601
FROZEN_BELOW = 0.5 / 255  # mean change of a pixel between frames, below rounding


def measure_video(video: Tensor) -> SimpleNamespace:
    """Return the metrics of a uint8 video (frames, 3, height, width); ``motion`` and ``frozen`` of
    one frame are 0.

    ``exposure`` is the mean luma, ``saturation`` the mean chroma (largest minus smallest channel),
    ``clipped`` the fraction of pixels with a channel at 0 or 255, ``motion`` the mean change of
    luma between neighboring frames at low resolution, ``frozen`` the fraction of nearly equal
    neighboring frames; see `_sharpness` for ``sharpness``.
    """
    firsts = evenly_spaced(NUM_PAIRS, len(video) - 1)
    frames = video[sorted({i + k for i in firsts for k in (0, 1)} or {0})]
    motion = 0.0
    frozen = 0.0
    if firsts:
        seconds = [i + 1 for i in firsts]
        change = _shrunk(_luma(video[seconds])) - _shrunk(_luma(video[firsts]))
        change = change.abs().mean((1, 2))
        motion = change.mean().item()
        frozen = (change < FROZEN_BELOW).float().mean().item()
    return SimpleNamespace(
        exposure=_luma(frames).mean().item(),
        saturation=((frames.amax(1) - frames.amin(1)).float().mean() / 255).item(),
        clipped=((frames.amin(1) == 0) | (frames.amax(1) == 255)).float().mean().item(),
        motion=motion,
        frozen=frozen,
        sharpness=_sharpness(_luma(video[evenly_spaced(NUM_SHARP_FRAMES, len(video))])),
    )


def thumbnail(video: Tensor) -> Tensor:
    """Reduce a video to a float64 thumbnail small enough to send to other ranks.

    Shape: (4 * 3 * 8 * 8,).
    """
    frames, height, width = THUMBNAIL
    index = torch.linspace(0, len(video) - 1, frames).round().long()
    return (
        (F.adaptive_avg_pool2d(video[index].float(), (height, width)) / 255)
        .flatten()
        .cpu()
        .double()
    )


def diversity(thumbnails: Sequence[Tensor], groups: Sequence[Hashable]) -> Tensor:
    """Return the mean distance ``mean |a - b|`` of two thumbnails of a group, for each group of two
    or more.
    """
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    stacks = [
        torch.stack([thumbnails[i] for i in numbers])
        for numbers in members.values()
        if len(numbers) > 1
    ]
    means = [F.pdist(stack, p=1).mean() / stack.shape[1] for stack in stacks]
    return torch.stack(means) if means else torch.empty(0)


def _luma(frames: Tensor) -> Tensor:
    """Return the luma in [0, 1].

    Shape: uint8 (frames, 3, height, width) -> (frames, height, width).
    """
    red, green, blue = (frames[:, k].float() * (LUMA[k] / 255) for k in range(3))
    return red + green + blue


def _shrunk(luma: Tensor) -> Tensor:
    """Average over squares so that the longer side has about 32 pixels, which removes
    pixel noise.
    """
    side = max(1, -(-max(luma.shape[1:]) // SMALL))
    if side == 1:
        return luma
    return F.avg_pool2d(luma[:, None], side, ceil_mode=True)[:, 0]


def _sharpness(luma: Tensor) -> float:
    """Return ``Var(laplacian Y) / (20 Var(Y))``, averaged over frames; it is invariant to
    brightness and contrast.

    The Laplacian of white noise has 20 times its variance, hence the factor. A uniform frame has
    sharpness 0.
    """
    if min(luma.shape[1:]) < 3:
        return 0.0
    inner = luma[:, 1:-1, 1:-1]
    laplacian = (
        luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] - 4 * inner
    )
    variance, detail = (values.flatten(1).var(1, correction=0) for values in (inner, laplacian))
    # Contrast below half a level is only rounding.
    return (detail / (20 * variance.clamp(min=(0.5 / 255) ** 2))).mean().item()
