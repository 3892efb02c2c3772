"""Videos and prompts to scores: the scorers by name, their weights, and the reward that they add up to.

A new reward is one class with the methods of `Scorer` and one line in ``SCORERS``. The settings' rules read this file
before torch is loaded: it must not import it.
"""

import inspect
import math
import pkgutil
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hyvideo.data.outside import parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Scores = dict[str, float]

DIMENSIONS = ("VQ", "MQ", "TA")  # visual quality, motion quality, text alignment


class Entry(NamedTuple):
    """A line of the registry."""

    class_path: str  # module:class; imported when asked for, so that a run loads the packages of its scorers only
    folder: str  # of its files, below the checkpoint folder
    files: tuple[str, ...] = (".",)  # of that folder: where they change, a stored evaluation is made again


_MINIATURE = ("reference_statistics.safetensors",)
SCORERS = {
    "miniature": Entry("hyvideo.miniature.reward:MiniatureScorer", ".", _MINIATURE),
    "miniature_videoalign": Entry("hyvideo.miniature.reward:LearnedMiniatureScorer", ".", (*_MINIATURE, "VideoReward")),
    "videoalign": Entry("hyvideo.models.reward_models.videoalign:VideoAlignScorer", "VideoReward"),
    "clip": Entry("hyvideo.models.reward_models.clip_metrics:ClipScorer", "clip/clip-vit-large-patch14"),
    "pickscore": Entry("hyvideo.models.reward_models.clip_metrics:PickScorer", "clip/PickScore_v1"),
    "vlm_judge": Entry("hyvideo.models.reward_models.vlm_judge:VlmJudge", ".", ()),
}

NOT_OPTIONS = ("name", "root", "device")
SERVICE_ATTEMPTS = 3  # times that every reward service is asked before the rewards are missing


class Scorer(Protocol):
    """A frozen model that scores videos."""

    def score(self, videos: "list[Tensor]", prompts: list[str], *, fps: float) -> list[Scores]:
        """Scores of each video with the dimensions VQ, MQ and TA; a value that is not finite means "could not score".

        Shape of each video: uint8 (frames, channels, height, width).
        """

    def check_prompts(self, prompts: list[str]) -> None:
        """Raises ValueError for a prompt that could not be scored, before a run begins."""

    def held_out(self, videos: "list[Tensor]", prompts: list[str]) -> "dict[str, SetMeasure]":
        """Measures of a whole set of videos that are never part of the reward, for validation. May be empty.

        The videos are those of one rank. Measures of a video alone, of which more is better, belong in an optional
        ``held_out_each(videos, prompts)``.
        """
        return {}


class SetMeasure(NamedTuple):
    """A measure of a whole set of videos, which may lie on several ranks: numbers of each video, then of the set."""

    rows: "Tensor"  # (videos, numbers), of the videos that the scorer was given
    of_set: "Callable[[Tensor], float]"  # from the float64 rows of all videos (all videos, numbers); NaN for too few


@dataclass(frozen=True)
class ScoreResult:
    """Scores of one video, or why there are none."""

    scores: Scores
    reason: str | None = None


class ScorerUnavailable(RuntimeError):
    """A scorer is out of reach, such as a service that is down: trying the videos one by one would not help."""


@dataclass(frozen=True)
class Reward:
    """Reward of one rollout. ``total`` is NaN where it is missing, never a number in its place."""

    total: float
    scores: Scores
    reason: str | None = None  # why it is missing

    @property
    def is_missing(self) -> bool:
        return not math.isfinite(self.total)

    @property
    def overall(self) -> float:
        """VQ + MQ + TA, whatever the weights: the figure that is reported."""
        return sum(self.scores.get(dimension, math.nan) for dimension in DIMENSIONS)


def check_options(options: Mapping[str, object]) -> None:
    """Raises ValueError for options that `make_scorer` takes as arguments of its own."""
    if refused := sorted(set(options) & set(NOT_OPTIONS)):
        raise ValueError(f"a scorer's options cannot have {', '.join(refused)}; its folder is the option path")


def parse_options(text: str) -> dict:
    """The scorer's options of a flag --options. Raises ValueError for text that is no JSON object of options."""
    try:
        options = parse_json(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"--options must be a JSON object, got {text:.200}")
    check_options(options)
    return options


def make_scorer(name: str, root: str | Path, *, device: "str | torch.device" = "cpu", **options) -> Scorer:
    """The scorer called ``name``, with its files below the checkpoint folder ``root``, or in that of the option path.

    Raises ValueError for an unknown name, an option that the class does not have, and files that cannot be used.
    """
    if name not in SCORERS:
        raise ValueError(f"reward_model must be one of {', '.join(SCORERS)}, got {name!r}")
    entry = SCORERS[name]
    cls = pkgutil.resolve_name(entry.class_path)
    parameters = inspect.signature(cls).parameters
    known = set(parameters) - set(NOT_OPTIONS) | {"path"}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"reward model {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    if wrong := [f"{key} {value!r:.60}" for key, value in options.items() if not _fits(value, parameters.get(key))]:
        raise ValueError(f"reward model {name} has options of another type, got {', '.join(wrong)}")
    path = options.pop("path", None) or Path(root) / entry.folder
    return cls(path, device=device, **options)


def _fits(value: object, parameter: inspect.Parameter | None) -> bool:
    """Claims that an option of a YAML file may have this value; a path that is no parameter of the class is a path."""
    expected = str | Path | None if parameter is None or parameter.name == "path" else parameter.annotation
    is_plain = expected in (int, float, bool, str) or isinstance(expected, types.UnionType)
    return not is_plain or (isinstance(value, expected) and (expected is bool or not isinstance(value, bool)))


def weighted(scores: Scores, weights: Mapping[str, float]) -> float:
    """``R = w_VQ VQ + w_MQ MQ + w_TA TA``, NaN where a dimension with a weight is absent or no finite number."""
    weights = {name: weight for name, weight in weights.items() if weight}
    if not all(is_finite(scores, name) for name in weights):
        return math.nan
    return sum(weight * scores[name] for name, weight in weights.items())


def is_finite(scores: Mapping[str, object], name: str) -> bool:
    """Claims that a score is there and a finite number."""
    return isinstance(scores.get(name), (int, float)) and math.isfinite(scores[name])
