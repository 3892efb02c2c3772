"""Videos and prompts to scores: the scorers by name, their weights, and what is done when one fails.

A new reward is one class with one method and one line in ``SCORERS``.
"""

import importlib
import inspect
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the names of the scorers are checked before anything slow is imported
    import torch
    from torch import Tensor

Scores = dict[str, float]


class Entry(NamedTuple):
    """A line of the registry."""

    where: str  # module:class; imported when it is asked for, so that a run loads the packages of its scorers only
    folder: str  # of its files, below the checkpoint folder


SCORERS = {
    "miniature": Entry("hyvideo.miniature.reward:MiniatureScorer", "."),
    "videoalign_local": Entry("hyvideo.miniature.reward:LearnedMiniatureScorer", "."),
    "videoalign": Entry("hyvideo.models.reward_models.videoalign:VideoAlignScorer", "VideoReward"),
    "clip": Entry("hyvideo.models.reward_models.clip_metrics:ClipScorer", "clip/clip-vit-large-patch14"),
    "pickscore": Entry("hyvideo.models.reward_models.clip_metrics:PickScorer", "clip/PickScore_v1"),
}

NOT_OPTIONS = ("name", "root", "device")


class Scorer(Protocol):
    """A frozen judge of videos."""

    def score(self, videos: "list[Tensor]", prompts: list[str], *, fps: float) -> list[Scores]:
        """One dict per video with the dimensions VQ, MQ and TA; a value that is not finite means "could not score".

        Args:
            videos: uint8. Shape of each: (frames, channels, height, width).
        """

    def check_prompts(self, prompts: list[str]) -> None:
        """Raises ValueError for a prompt that could not be scored, before a run begins."""

    def held_out(self, videos: "list[Tensor]", prompts: list[str]) -> Scores:
        """Measures of a whole set of videos that are never part of the reward, for validation. May be empty.

        What can be measured of a video alone belongs in an optional ``held_out_each(videos, prompts)``, a dict per
        video of measures of which more is better: validation gathers those of all ranks, and watches them.
        """


@dataclass(frozen=True)
class ScoreResult:
    """What a scorer said of one video, or why it said nothing."""

    scores: Scores
    reason: str | None = None


class ScorerUnavailable(RuntimeError):
    """A scorer is out of reach, as a service that is down: no video can be scored, one by one neither."""


@dataclass(frozen=True)
class Reward:
    """What one rollout got. ``total`` is NaN where the reward is missing, never a number in its place."""

    total: float
    scores: Scores
    reason: str | None = None  # why it is missing

    @property
    def is_missing(self) -> bool:
        return not math.isfinite(self.total)

    @property
    def overall(self) -> float:
        """VQ + MQ + TA, whatever the weights: the figure that is reported."""
        return sum(self.scores.get(dimension, math.nan) for dimension in ("VQ", "MQ", "TA"))


def check_options(options: Mapping[str, object]) -> None:
    """Raises ValueError for options that `make_scorer` is given otherwise."""
    if found := sorted(set(options) & set(NOT_OPTIONS)):
        raise ValueError(
            f"a scorer's options cannot have {', '.join(found)}: its device is that of the run or service; its folder "
            "is the option path"
        )


def make_scorer(name: str, root: str | Path, *, device: "str | torch.device" = "cpu", **options) -> Scorer:
    """The scorer called ``name``, with its files below the checkpoint folder ``root``.

    Args:
        options: Of the scorer's class; ``path`` names another folder of its files.

    Raises: ValueError for an unknown name, an option that the class does not have, or files that cannot be used.
    """
    if name not in SCORERS:
        raise ValueError(f"reward_model must be one of {', '.join(SCORERS)}, got {name!r}")
    entry = SCORERS[name]
    module, _, class_name = entry.where.partition(":")
    cls = getattr(importlib.import_module(module), class_name)
    signature = inspect.signature(cls)
    known = set(signature.parameters)
    own = known - set(NOT_OPTIONS) | {"path"}
    if unknown := sorted(set(options) - own):
        raise ValueError(f"reward model {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(own))}")
    if wrong := [one for one in options if not _fits(options[one], signature.parameters.get(one))]:
        told = ", ".join(f"{one} {options[one]!r:.60}" for one in wrong)
        raise ValueError(f"reward model {name} has options of another type, got {told}")
    path = options.pop("path", None) or Path(root) / entry.folder
    return cls(path, device=device, **options)


def _fits(value: object, parameter: inspect.Parameter | None) -> bool:
    """Claims that an option of a YAML file may have this value; a path that is no parameter of the class is a path."""
    wanted = str | Path | None if parameter is None or parameter.name == "path" else parameter.annotation
    is_plain = wanted in (int, float, bool, str) or isinstance(wanted, types.UnionType)
    return not is_plain or (isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)))


def rewards_of(scores: Iterable[Scores], weights: Mapping[str, float]) -> list[Reward]:
    """``R = w_VQ VQ + w_MQ MQ + w_TA TA``; a dimension that is absent or not finite makes the reward missing."""
    return [Reward(weighted(one, weights), one) for one in scores]


def weighted(scores: Scores, weights: Mapping[str, float]) -> float:
    """The sum of the weighted dimensions, NaN where one with a weight is absent or no finite number."""
    parts = [(weight, scores.get(dimension)) for dimension, weight in weights.items() if weight]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for _, value in parts):
        return math.nan
    return sum(weight * value for weight, value in parts)
