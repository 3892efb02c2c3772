"""Held-out metrics: properties of videos that are never rewarded and that change under reward hacking.

Over-exposure, saturated color, frozen motion, grids and blur can raise a learned reward without improving the video.
Each metric is computed from pixels, as a fraction of the full range, on a subset of the frames of long videos.
"""

import math
import statistics
import sys
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.data.outside import describe_error
from hyvideo.distributed.collectives import all_objects, merge_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.evaluation.reward_hacking.rule import NUM_PARTS, SET_MEASURES, Dispersion
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Reward, Scores, SetMeasure
from hyvideo.records.run_files import evenly_spaced

NUM_PAIRS = 16  # of neighboring frames measured
NUM_SHARP_FRAMES = 4
SMALL = 32  # longer side in pixels, for motion
THUMBNAIL = (4, 8, 8)  # frames, height, width; diversity compares thumbnails
LUMA = (0.299, 0.587, 0.114)  # Rec. 601
FROZEN_BELOW = 0.5 / 255  # mean change of a pixel between frames, below rounding


def measure_video(video: Tensor) -> SimpleNamespace:
    """Return the metrics of a uint8 video (frames, 3, height, width); ``motion`` and ``frozen`` of one frame are 0.

    ``exposure`` is the mean luma, ``saturation`` the mean chroma (largest minus smallest channel), ``clipped`` the
    fraction of pixels with a channel at 0 or 255, ``motion`` the mean change of luma between neighboring frames at low
    resolution, ``frozen`` the fraction of nearly equal neighboring frames; see `_sharpness` for ``sharpness``.
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
    """Reduce a video to a float64 thumbnail small enough to send to other ranks. Shape: (4 * 3 * 8 * 8,)."""
    frames, height, width = THUMBNAIL
    index = torch.linspace(0, len(video) - 1, frames).round().long()
    return (F.adaptive_avg_pool2d(video[index].float(), (height, width)) / 255).flatten().cpu().double()


def diversity(thumbnails: Sequence[Tensor], groups: Sequence[Hashable]) -> Tensor:
    """Return the mean distance ``mean |a - b|`` of two thumbnails of a group, for each group of two or more."""
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    pairs = [list(combinations(numbers, 2)) for numbers in members.values() if len(numbers) > 1]
    means = [torch.stack([(thumbnails[a] - thumbnails[b]).abs().mean() for a, b in group]).mean() for group in pairs]
    return torch.stack(means) if means else torch.empty(0)


def measure_all(
    videos: Mapping[int, Tensor | None],  # this rank's videos, by number; None if not decodable
    rewards: Mapping[int, Reward],  # this rank's rewards, by number
    prompts: Sequence[str],  # of all ranks' videos, by number
    groups: Sequence[Hashable],  # likewise; the videos of a group share a prompt
    scorer: AsyncScorer,
    mesh: Mesh,
) -> tuple[dict[str, float], dict[str, Dispersion]]:
    """Return mean and spread of each held-out metric of single videos, over the videos of all ranks."""
    decoded = {row: video for row, video in videos.items() if video is not None}
    scores: list[Scores] = [{} for _ in decoded]
    with _missing_if_it_fails("held_out_each"):
        scores = scorer.held_out_each(list(decoded.values()), [prompts[row] for row in decoded])
    local = {}
    for (row, video), video_scores in zip(decoded.items(), scores):
        measured = {f"held_out/{name}": value for name, value in vars(measure_video(video)).items()}
        local[row] = measured | video_scores | _without_weight(rewards[row], scorer.weights), thumbnail(video)
    rows = dict(sorted(ChainMap(*all_objects(local, mesh)).items()))
    measured_of, thumbnails = [values for values, _ in rows.values()], [picture for _, picture in rows.values()]
    names = sorted(set().union(*measured_of))
    columns = {name: [values[name] for values in measured_of if name in values] for name in names}
    columns["held_out/diversity"] = diversity(thumbnails, [groups[row] for row in rows]).tolist()
    finite = {name: [value for value in column if math.isfinite(value)] for name, column in columns.items()}
    finite = {name: values for name, values in finite.items() if values}
    spreads = {name: Dispersion(statistics.pstdev(values), len(values)) for name, values in finite.items()}
    return {name: statistics.fmean(values) for name, values in finite.items()}, spreads


def measure_sets(
    videos: Mapping[int, Tensor | None], prompts: Sequence[str], scorer: AsyncScorer, mesh: Mesh
) -> tuple[dict[str, float], dict[str, Dispersion]]:
    """Return the metrics of the whole set of videos of all ranks, with a spread for those in `SET_MEASURES`.

    As for a mean, ``std / sqrt(count - 1)`` is the standard error. ``videos`` and ``prompts`` are those of
    `measure_all`.
    """
    decoded = {row: video for row, video in videos.items() if video is not None}
    local: dict[str, SetMeasure] = {}
    with _missing_if_it_fails("held_out"):
        local = scorer.held_out(list(decoded.values()), [prompts[row] for row in decoded])
    # Includes metrics that only other ranks have measured.
    widths = dict(ChainMap(*all_objects({name: metric.rows.shape[1] for name, metric in local.items()}, mesh)))
    means, spreads = {}, {}
    for name in sorted(widths):
        rows = dict(zip(decoded, local[name].rows.tolist())) if name in local else {}
        table = merge_rows(rows, len(prompts), widths[name], mesh)
        table = table[table.isfinite().all(1)]
        measured = None
        if name in local:
            with _missing_if_it_fails(f"of_set of {name}"):
                measured = _value_and_error(local[name].of_set, table, name in SET_MEASURES)
        # A rank without videos has no function; all others compute the same result.
        value, error = next(filter(None, all_objects(measured, mesh)), (math.nan, math.nan))
        if math.isfinite(value):
            means[name] = value
        if math.isfinite(error):
            spreads[name] = Dispersion(error * math.sqrt(len(table) - 1), len(table))
    return means, spreads


@contextmanager
def _missing_if_it_fails(method: str) -> Iterator[None]:
    """Context in which a scorer's error makes its held-out metrics missing and does not end the run, as for `score`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = describe_error(error)
        print(
            f"\nwarning: {method} of a scorer failed ({reason}); its held-out metrics are missing in this validation",
            file=sys.stderr,
            flush=True,
        )


def _value_and_error(of_set: Callable[[Tensor], float], rows: Tensor, with_error: bool) -> tuple[float, float]:
    """Return a metric of a set and its jackknife standard error, from leaving out one part at a time."""
    value, count = of_set(rows), min(len(rows), NUM_PARTS)
    if not with_error or count < 3:
        return value, math.nan
    parts = torch.arange(len(rows)) % count
    values = [of_set(rows[parts != part]) for part in range(count)]
    return value, math.sqrt((count - 1) * statistics.pvariance(values))


def _without_weight(reward: Reward, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the scores without a weight in the reward, except ``Overall``, whose parts may have one."""
    others = {name: score for name, score in reward.scores.items() if not weights.get(name) and name != "Overall"}
    return {name: float(score) for name, score in others.items() if isinstance(score, (int, float))}


def _luma(frames: Tensor) -> Tensor:
    """Return the luma in [0, 1]. Shape: uint8 (frames, 3, height, width) -> (frames, height, width)."""
    red, green, blue = (frames[:, k].float() * (LUMA[k] / 255) for k in range(3))
    return red + green + blue


def _shrunk(luma: Tensor) -> Tensor:
    """Average over squares so that the longer side has about 32 pixels, which removes pixel noise."""
    side = max(1, -(-max(luma.shape[1:]) // SMALL))
    return F.avg_pool2d(luma[:, None], side, ceil_mode=True)[:, 0] if side > 1 else luma


def _sharpness(luma: Tensor) -> float:
    """Return ``Var(laplacian Y) / (20 Var(Y))``, averaged over frames; it is invariant to brightness and contrast.

    The Laplacian of white noise has 20 times its variance, hence the factor. A uniform frame has sharpness 0.
    """
    if min(luma.shape[1:]) < 3:
        return 0.0
    inner = luma[:, 1:-1, 1:-1]
    laplacian = luma[:, :-2, 1:-1] + luma[:, 2:, 1:-1] + luma[:, 1:-1, :-2] + luma[:, 1:-1, 2:] - 4 * inner
    variance, detail = (values.flatten(1).var(1, correction=0) for values in (inner, laplacian))
    # Contrast below half a level is only rounding.
    return (detail / (20 * variance.clamp(min=(0.5 / 255) ** 2))).mean().item()
