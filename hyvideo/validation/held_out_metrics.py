"""Measuring the held-out metrics of a validation: of the pixels of each video, and of the scorers.

`held_out` has the rule that compares them with the base model.
"""

import math
import statistics
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyvideo.distributed.collectives import all_objects, from_main
from hyvideo.distributed.mesh import Mesh
from hyvideo.rewards import contract
from hyvideo.rewards.rewards import OVERALL, Reward, Scorer, Scores, short_names
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.validation.held_out import Dispersion, warn
from hyvideo.validation.pixels import diversity, measure_video, thumbnail


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
        if video is None:
            continue
        metrics = {f"held_out/{name}": value for name, value in vars(measure_video(video)).items()}
        for name, score in rewards[row].scores.items():
            # the parts of the overall score may have a weight
            if not weights.get(name) and name != OVERALL and isinstance(score, (int, float)):
                metrics[name] = float(score)
        measured[row] = Measured(metrics, thumbnail(video))
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


class _Answers:
    """What a method of the scorers returned for the videos of this rank, in parts."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, Any]] = {}  # by scorer and number of the video
        self.failed: dict[str, str] = {}  # reason by scorer

    def add(self, numbers: Collection[int], answers: Mapping[str, Sequence | str]) -> None:
        for scorer, rows in answers.items():
            if isinstance(rows, str):
                self.failed.setdefault(scorer, rows)
            else:
                self.of.setdefault(scorer, {}).update(zip(numbers, rows, strict=True))


class ScorerMetrics:
    """Held-out metrics that the scorers define, of videos that are added in parts; the videos are
    not kept.

    A scorer whose method fails for a part, on any rank, has no metrics of this method: they would
    lack videos. ``on_failure`` is then called on the main rank.
    """

    def __init__(self, scorer: AsyncScorer, mesh: Mesh, on_failure: Callable[[str], None] = warn):
        self.scorer = scorer
        self.mesh = mesh
        self.on_failure = on_failure
        self._each = _Answers()
        self._features = _Answers()

    def add(self, videos: Mapping[int, Tensor | None], prompts: Sequence[str]) -> None:
        """Add some of this rank's videos, by number; None if not decodable.

        ``prompts`` are of all videos.
        """
        numbers = [number for number, video in videos.items() if video is not None]
        clips = [videos[number] for number in numbers]
        texts = [prompts[number] for number in numbers]

        def measure_each(name: str, scorer: Scorer) -> list[Scores]:
            return contract.held_out_each(scorer, clips, texts)

        def features(name: str, scorer: Scorer) -> list[Tensor]:
            return list(contract.features(scorer, clips, texts).double().cpu())

        if numbers:
            self._each.add(numbers, self.scorer.call_all("held_out_each", measure_each))
            self._features.add(numbers, self.scorer.call_all("features", features))

    def of_videos(self) -> dict[int, Scores]:
        """Return the metrics of each of this rank's videos, by number. Collective."""
        failed = self._report(self._each.failed)
        found: dict[int, dict[str, Scores]] = {}
        for scorer, rows in self._each.of.items():
            if scorer not in failed:
                for row, scores in rows.items():
                    found.setdefault(row, {})[scorer] = scores
        clashes = set().union(*all_objects(self._clashes(found.values()), self.mesh))
        return {row: self._named(by_scorer, clashes) for row, by_scorer in found.items()}

    def of_set(self) -> Scores:
        """Return the metrics of all videos together, which a scorer computes once, on the main
        rank. Collective.
        """
        failed = self._report(self._features.failed)
        parts = all_objects(self._features.of, self.mesh)
        results: dict[str, Scores | str] = {}

        def measure_set(name: str, scorer: Scorer) -> Scores:
            rows = dict(sorted(ChainMap(*(part.get(name, {}) for part in parts)).items()))
            if name in failed or not rows:
                return {}
            table = torch.stack(list(rows.values()))
            return contract.held_out(scorer, table[table.isfinite().all(1)])

        if self.mesh.is_main:
            results = self.scorer.call_all("held_out", measure_set)
        results = from_main(results, self.mesh)
        self._report({name: each for name, each in results.items() if isinstance(each, str)})
        by_scorer = {name: each for name, each in results.items() if isinstance(each, dict)}
        found = self._named(by_scorer, self._clashes([by_scorer]))
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _clashes(self, results: Iterable[Mapping[str, Scores]]) -> set[tuple[str, str]]:
        """Return the scorers and metrics that have the name of a dimension, or of an earlier
        scorer's metric with another value in one of ``results``.
        """
        dimensions = {name for each in self.scorer.names.declared.values() for name in each}
        found = set()
        for by_scorer in results:
            taken: Scores = {}
            for scorer, scores in by_scorer.items():
                for name, value in scores.items():
                    if name in dimensions or taken.setdefault(name, value) != value:
                        found.add((scorer, name))
        return found

    def _named(self, by_scorer: Mapping[str, Scores], clashes: set[tuple[str, str]]) -> Scores:
        """Return the metrics of all scorers; one of ``clashes`` is SCORER/METRIC."""
        labels = short_names(list(by_scorer))
        found: Scores = {}
        for scorer, scores in by_scorer.items():
            for name, value in scores.items():
                has_clash = (scorer, name) in clashes
                found[f"{labels[scorer]}/{name}" if has_clash else name] = value
        return found

    def _report(self, failures: Mapping[str, str]) -> set[str]:
        """Report the failures of all ranks, and return the names of the scorers. Collective."""
        reasons = dict(ChainMap(*all_objects(dict(failures), self.mesh)))
        if self.mesh.is_main:
            for scorer, reason in sorted(reasons.items()):
                self.on_failure(f"held-out metrics of reward {scorer} are missing: {reason}")
        return set(reasons)
