"""Measures of videos that are never rewarded: the traces that reward hacking leaves in pixels.

Over-exposure, garish colour, clips that stand still, grids and blur raise a learned reward without a better video; a
policy that has found one of them also makes all its videos alike. Each measure is a plain number of a video's pixels,
with levels and distances as fractions of the full range. Of a large video some frames are looked at.
"""

import math
import statistics
from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.distributed.collectives import all_objects, merge_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.reward_hacking.rule import NUM_PARTS, SET_MEASURES, Dispersion
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.records.run_files import evenly_spaced

NUM_PAIRS = 16  # of neighbouring frames looked at
NUM_SHARP_FRAMES = 4
SMALL = 32  # pixels of the longer side for motion
THUMBNAIL = (4, 8, 8)  # frames, height, width of what videos are compared by
LUMA = (0.299, 0.587, 0.114)  # Rec. 601
FROZEN_BELOW = 0.5 / 255  # mean change of a pixel from one frame to the next: less than rounding shows


def measure_video(video: Tensor) -> SimpleNamespace:
    """Measures of a uint8 video (frames, 3, height, width); a single frame neither moves nor freezes.

    ``exposure`` is the mean luma, ``saturation`` the mean chroma (largest minus smallest channel), ``clipped`` the
    fraction of pixels with a channel at 0 or 255; ``motion`` the mean change of luma between neighbouring frames at low
    resolution, ``frozen`` the fraction of neighbours that are nearly equal; ``sharpness`` as of `_sharpness`.
    """
    firsts = evenly_spaced(NUM_PAIRS, len(video) - 1)
    frames = video[sorted({i + k for i in firsts for k in (0, 1)} or {0})]
    change = torch.zeros(1)
    if firsts:
        small = _shrunk(_luma(video[firsts])), _shrunk(_luma(video[[i + 1 for i in firsts]]))
        change = (small[1] - small[0]).abs().mean((1, 2))
    return SimpleNamespace(
        exposure=_luma(frames).mean().item(),
        saturation=((frames.amax(1) - frames.amin(1)).float().mean() / 255).item(),
        clipped=((frames.amin(1) == 0) | (frames.amax(1) == 255)).float().mean().item(),
        motion=change.mean().item(),
        frozen=(change < FROZEN_BELOW).float().mean().item() if firsts else 0.0,
        sharpness=_sharpness(_luma(video[evenly_spaced(NUM_SHARP_FRAMES, len(video))])),
    )


def thumbnail(video: Tensor) -> Tensor:
    """A video made small enough to send to other ranks. Shape: (4 * 3 * 8 * 8,)."""
    frames, height, width = THUMBNAIL
    index = torch.linspace(0, len(video) - 1, frames).round().long()
    return (F.adaptive_avg_pool2d(video[index].float(), (height, width)) / 255).flatten().cpu()


def diversity(thumbnails: Tensor, groups: Sequence[Hashable]) -> Tensor:
    """Mean distance of two videos of a group, ``mean |a - b|``, for every group of two or more. Shape: (groups,).

    Thumbnails (videos, values) with a value that is not finite are no videos; ``groups`` says the prompt of each.
    """
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        if thumbnails[number].isfinite().all():
            members.setdefault(group, []).append(number)
    pairs = [list(combinations(numbers, 2)) for numbers in members.values() if len(numbers) > 1]
    means = [torch.stack([(thumbnails[a] - thumbnails[b]).abs().mean() for a, b in some]).mean() for some in pairs]
    return torch.stack(means) if means else torch.empty(0)


def measure_all(
    videos: Mapping[int, Tensor | None],
    rewards: Mapping[int, Reward],
    prompts: Sequence[str],
    groups: Sequence[Hashable],
    scorer: AsyncScorer,
    mesh: Mesh,
) -> tuple[dict[str, float], dict[str, Dispersion]]:
    """Means and spreads of everything that is measured of single videos and not rewarded, over those of all ranks.

    Args:
        videos, rewards: Of this rank by number; a video that could not be decoded is None.
        prompts, groups: Of the videos of all ranks, by number; those of one group belong to one prompt.
    """
    decoded = {row: video for row, video in videos.items() if video is not None}
    scores = scorer.held_out_each(list(decoded.values()), [prompts[row] for row in decoded])
    measured = {
        row: {f"held_out/{name}": value for name, value in vars(measure_video(video)).items()}
        | of_video
        | _without_weight(rewards[row], scorer.weights)
        for (row, video), of_video in zip(decoded.items(), scores)
    }
    names = sorted(set().union(*all_objects({name for values in measured.values() for name in values}, mesh)))
    local = {
        row: [*(values.get(name, math.nan) for name in names), *thumbnail(decoded[row]).tolist()]
        for row, values in measured.items()
    }
    table = merge_rows(local, len(prompts), len(names) + 3 * math.prod(THUMBNAIL), mesh)
    columns = dict(zip(names, table[:, : len(names)].T.tolist()))
    columns["held_out/diversity"] = diversity(table[:, len(names) :], groups).tolist()
    finite = {name: [value for value in column if math.isfinite(value)] for name, column in columns.items()}
    finite = {name: values for name, values in finite.items() if values}
    spreads = {name: Dispersion(statistics.pstdev(values), len(values)) for name, values in finite.items()}
    return {name: statistics.fmean(values) for name, values in finite.items()}, spreads


def measure_sets(
    videos: Mapping[int, Tensor | None], prompts: Sequence[str], scorer: AsyncScorer, mesh: Mesh
) -> tuple[dict[str, float], dict[str, Dispersion]]:
    """Measures of the whole set of videos, each once, whichever rank has it; with the spread of those that are watched.

    The spread is such that, as for a mean, ``std / sqrt(count - 1)`` is the standard error; ``count`` are the videos.
    ``videos`` and ``prompts`` are as of `measure_all`.
    """
    decoded = {row: video for row, video in videos.items() if video is not None}
    local = scorer.held_out(list(decoded.values()), [prompts[row] for row in decoded])
    # By name, also of what only other ranks have.
    widths = dict(ChainMap(*all_objects({name: one.rows.shape[1] for name, one in local.items()}, mesh)))
    means, spreads = {}, {}
    for name in sorted(widths):
        rows = dict(zip(decoded, local[name].rows.tolist())) if name in local else {}
        table = merge_rows(rows, len(prompts), widths[name], mesh)
        table = table[table.isfinite().all(1)]
        measured = _value_and_error(local[name].of_set, table, name in SET_MEASURES) if name in local else None
        # A rank without videos has no function; those that have one find the same.
        value, error = next(filter(None, all_objects(measured, mesh)))
        if math.isfinite(value):
            means[name] = value
        if math.isfinite(error):
            spreads[name] = Dispersion(error * math.sqrt(len(table) - 1), len(table))
    return means, spreads


def _value_and_error(of_set: Callable[[Tensor], float], rows: Tensor, with_error: bool) -> tuple[float, float]:
    """A measure of a set and its standard error by the jackknife, which leaves out one part in turn."""
    value, count = of_set(rows), min(len(rows), NUM_PARTS)
    if not with_error or count < 3:
        return value, math.nan
    parts = torch.arange(len(rows)) % count
    values = [of_set(rows[parts != part]) for part in range(count)]
    return value, math.sqrt((count - 1) * statistics.pvariance(values))


def _without_weight(reward: Reward, weights: Mapping[str, float]) -> dict[str, float]:
    """Scores that the reward does not count. ``Overall`` is a sum that it may count parts of."""
    others = {name: score for name, score in reward.scores.items() if not weights.get(name) and name != "Overall"}
    return {name: float(score) for name, score in others.items() if isinstance(score, (int, float))}


def _luma(frames: Tensor) -> Tensor:
    """Brightness in [0, 1]. Shape: uint8 (frames, 3, height, width) to (frames, height, width)."""
    red, green, blue = (frames[:, k].float() * (LUMA[k] / 255) for k in range(3))
    return red + green + blue


def _shrunk(luma: Tensor) -> Tensor:
    """Means over squares, so that the longer side has about 32 pixels; noise of single pixels averages out."""
    side = max(1, -(-max(luma.shape[1:]) // SMALL))
    return F.avg_pool2d(luma[:, None], side, ceil_mode=True)[:, 0] if side > 1 else luma


def _sharpness(luma: Tensor) -> float:
    """``Var(laplacian Y) / (20 Var(Y))``, mean over frames: neither brightness nor contrast counts.

    The Laplacian of four neighbours gives 20 variances of white noise. A frame of one grey has 0.
    """
    if min(luma.shape[1:]) < 3:
        return 0.0
    inner = luma[:, 1:-1, 1:-1]
    laplacian = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] - 4 * inner
    variance, detail = (values.flatten(1).var(1, correction=0) for values in (inner, laplacian))
    # Below half a level of contrast there is rounding and nothing else.
    return (detail / (20 * variance.clamp(min=(0.5 / 255) ** 2))).mean().item()
