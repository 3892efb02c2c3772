"""Held-out metrics: properties of videos that are never rewarded and that change under reward
hacking.

Over-exposure, saturated color, frozen motion, grids and blur can raise a learned reward without
improving the video. Each metric is computed from pixels, as a fraction of the full range, on a
subset of the frames of long videos.
"""

import math
import statistics
import sys
from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.distributed.collectives import all_objects, merge_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.records.run_files import evenly_spaced
from hyvideo.rewards.rewards import OVERALL, Reward, Scores
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.validation.reward_hacking.rule import NUM_PARTS, SET_MEASURES, Dispersion

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


@dataclass(frozen=True)
class Measured:
    """All that is kept of a measured video."""

    metrics: dict[str, float]
    thumbnail: Tensor


def measure_videos(
    # this rank's videos, or a part of them, by number; None if not decodable
    videos: Mapping[int, Tensor | None],
    rewards: Mapping[int, Reward],  # by number
    weights: Mapping[str, float],  # of the dimensions in the reward
) -> dict[int, Measured]:
    """Return the metrics of the pixels, the scores without a weight and the thumbnail of each
    decoded video.
    """
    measured = {}
    for row, video in videos.items():
        if video is not None:
            of_pixels = {
                f"held_out/{name}": value for name, value in vars(measure_video(video)).items()
            }
            measured[row] = Measured(
                of_pixels | _without_weight(rewards[row], weights), thumbnail(video)
            )
    return measured


def summarise_videos(
    measured: Mapping[int, Measured],  # this rank's videos, by number
    of_scorers: Mapping[int, Scores],  # `ScorerMetrics.of_videos`
    # of all ranks' videos, by number; the videos of a group share a prompt
    groups: Sequence[Hashable],
    mesh: Mesh,
) -> tuple[dict[str, float], dict[str, Dispersion]]:
    """Return mean and spread of each held-out metric of single videos, over the videos of all
    ranks.
    """
    local = {
        row: (video.metrics | of_scorers.get(row, {}), video.thumbnail)
        for row, video in measured.items()
    }
    rows = dict(sorted(ChainMap(*all_objects(local, mesh)).items()))
    measured_of = [values for values, _ in rows.values()]
    thumbnails = [picture for _, picture in rows.values()]
    names = sorted(set().union(*measured_of))
    columns = {name: [values[name] for values in measured_of if name in values] for name in names}
    columns["held_out/diversity"] = diversity(thumbnails, [groups[row] for row in rows]).tolist()
    finite = {
        name: [value for value in column if math.isfinite(value)]
        for name, column in columns.items()
    }
    finite = {name: values for name, values in finite.items() if values}
    spreads = {
        name: Dispersion(statistics.pstdev(values), len(values)) for name, values in finite.items()
    }
    return {name: statistics.fmean(values) for name, values in finite.items()}, spreads


def print_failure(message: str) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)


class ScorerMetrics:
    """Held-out metrics that the scorers define, of videos that are added in parts; the videos are
    not kept.

    A scorer whose method fails for a part, on any rank, has no metrics of this method: they would
    lack videos. ``on_failure`` is then called on the main rank.
    """

    def __init__(
        self, scorer: AsyncScorer, mesh: Mesh, on_failure: Callable[[str], None] = print_failure
    ):
        self.scorer = scorer
        self.mesh = mesh
        self.on_failure = on_failure
        # of this rank's videos, by scorer and number
        self._scores: dict[str, dict[int, Scores]] = {}
        # by scorer, metric and number
        self._vectors: dict[str, dict[str, dict[int, list[float]]]] = {}
        self._of_set: dict[str, Callable[[Tensor], float]] = {}  # by metric
        self._failed_each: dict[str, str] = {}  # reason by scorer
        self._failed_sets: dict[str, str] = {}

    def add(self, videos: Mapping[int, Tensor | None], prompts: Sequence[str]) -> None:
        """Add some of this rank's videos, by number; None if not decodable.

        ``prompts`` are of all videos.
        """
        decoded = {row: video for row, video in videos.items() if video is not None}
        clips = list(decoded.values())
        texts = [prompts[row] for row in decoded]
        for scorer, scores in self.scorer.held_out_each(clips, texts).items():
            if isinstance(scores, str):
                self._failed_each.setdefault(scorer, scores)
            else:
                self._scores.setdefault(scorer, {}).update(zip(decoded, scores, strict=True))
        for scorer, measures in self.scorer.held_out(clips, texts).items():
            if isinstance(measures, str):
                self._failed_sets.setdefault(scorer, measures)
                continue
            vectors = self._vectors.setdefault(scorer, {})
            for name, measure in measures.items():
                vectors.setdefault(name, {}).update(
                    zip(decoded, measure.rows.tolist(), strict=True)
                )
                self._of_set[name] = measure.of_set

    def of_videos(self) -> dict[int, Scores]:
        """Return the metrics of each of this rank's videos, by number. Collective."""
        failed = self._report(self._failed_each)
        found: dict[int, Scores] = {}
        for scorer, rows in self._scores.items():
            if scorer not in failed:
                for row, scores in rows.items():
                    found[row] = found.get(row, {}) | scores
        return found

    def of_set(self, num_videos: int) -> tuple[dict[str, float], dict[str, Dispersion]]:
        """Return the metrics of the ``num_videos`` of all ranks, with a spread for those in
        `SET_MEASURES`. Collective.

        As for a mean, ``std / sqrt(count - 1)`` is the standard error. A metric that fails is
        missing.
        """
        failed = self._report(self._failed_sets)
        kept = (vectors for scorer, vectors in self._vectors.items() if scorer not in failed)
        local = dict(ChainMap(*kept))
        # Includes metrics that only other ranks have measured.
        local_widths = {
            name: len(next(iter(rows.values()))) for name, rows in local.items() if rows
        }
        widths = dict(ChainMap(*all_objects(local_widths, self.mesh)))
        means = {}
        spreads = {}
        for name in sorted(widths):
            table = merge_rows(local.get(name, {}), num_videos, widths[name], self.mesh)
            table = table[table.isfinite().all(1)]
            # a rank without videos has no function
            measured: tuple[float, float] | str | None = None
            try:
                if local.get(name):
                    measured = _value_and_error(self._of_set[name], table, name in SET_MEASURES)
            except ValueError as failure:
                measured = str(failure)
            results = [result for result in all_objects(measured, self.mesh) if result is not None]
            failures = [result for result in results if isinstance(result, str)]
            if failures:
                if self.mesh.is_main:
                    self.on_failure(f"the held-out metric {name} is missing: {failures[0]}")
                continue
            value, error = results[0]  # all ranks compute the same result
            if math.isfinite(value):
                means[name] = value
            if math.isfinite(error):
                spreads[name] = Dispersion(error * math.sqrt(len(table) - 1), len(table))
        return means, spreads

    def _report(self, failures: Mapping[str, str]) -> set[str]:
        """Report the failures of all ranks, and return the names of the scorers. Collective."""
        reasons = dict(ChainMap(*all_objects(dict(failures), self.mesh)))
        if self.mesh.is_main:
            for scorer, reason in sorted(reasons.items()):
                self.on_failure(f"held-out metrics of reward {scorer} are missing: {reason}")
        return set(reasons)


def _value_and_error(
    of_set: Callable[[Tensor], float], rows: Tensor, with_error: bool
) -> tuple[float, float]:
    """Return a metric of a set and its jackknife standard error, from leaving out one part at a
    time.
    """
    value = of_set(rows)
    count = min(len(rows), NUM_PARTS)
    if not with_error or count < 3:
        return value, math.nan
    parts = torch.arange(len(rows)) % count
    values = [of_set(rows[parts != part]) for part in range(count)]
    return value, math.sqrt((count - 1) * statistics.pvariance(values))


def _without_weight(reward: Reward, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the scores without a weight in the reward, except ``Overall``, whose parts may have
    one.
    """
    others = {
        name: score
        for name, score in reward.scores.items()
        if not weights.get(name) and name != OVERALL
    }
    return {name: float(score) for name, score in others.items() if isinstance(score, (int, float))}


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
