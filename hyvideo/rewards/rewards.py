"""The reward interface: scorers and their registry, scores, and the reward as their weighted sum.

A custom reward is a function ``(videos, prompts, fps)`` or a class with the methods of `Scorer`,
named by its location: ``my_rewards.py:brightness`` or ``package.module:Brightness``. This file must
not import torch, because the rules between settings import it first.
"""

import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hyvideo.files.custom_code import load_object, named_errors, restored_state

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Scores = dict[str, float]

DIMENSIONS = ("VQ", "MQ", "TA")  # visual quality, motion quality, text alignment
# VQ + MQ + TA, which a run adds itself. A scorer may return it, but it has no weight and is no
# held-out metric.
OVERALL = "Overall"
# Keys of a recorded video besides its scores, and of a validation besides its metrics: no dimension
# and no held-out metric may have one of these names.
RESERVED_NAMES = (
    *"number prompt seed iteration group member file reward reward_std advantage missing "
    "reason mean std".split(),
    *"spreads hacking made_with seen/reward unseen/reward".split(),
)


class Entry(NamedTuple):
    """A scorer in the registry."""

    class_path: str  # module:class, imported only if the run uses the scorer
    folder: str  # folder of its files, below the checkpoint folder
    # files in it; if they change, a stored evaluation is recomputed
    files: tuple[str, ...] = (".",)
    # unless its files or a rubric have others; None if its answers decide
    dimensions: tuple[str, ...] | None = DIMENSIONS


_MINIATURE = ("reference_statistics.safetensors",)
SCORERS = {
    "miniature": Entry("hyvideo.miniature.reward:MiniatureScorer", ".", _MINIATURE),
    "miniature_videoalign": Entry(
        "hyvideo.miniature.reward:LearnedMiniatureScorer", ".", (*_MINIATURE, "VideoReward")
    ),
    "videoalign": Entry("hyvideo.rewards.videoalign:VideoAlignScorer", "VideoReward"),
    "clip": Entry(
        "hyvideo.rewards.clip_metrics:ClipScorer",
        "clip/clip-vit-large-patch14",
        dimensions=("CLIP_cosine", "CLIPScore", "CLIPScore_30"),
    ),
    "pickscore": Entry(
        "hyvideo.rewards.clip_metrics:PickScorer",
        "clip/PickScore_v1",
        dimensions=("Pick_cosine", "PickScore"),
    ),
    "hpsv3": Entry(
        "hyvideo.rewards.hpsv3:HPSv3Scorer", "HPSv3", dimensions=("HPSv3", "HPSv3_top30")
    ),
    "vlm_judge": Entry("hyvideo.rewards.vlm_judge:VlmJudge", ".", ()),
    "unified_reward": Entry(
        "hyvideo.rewards.vlm_judge:UnifiedReward",
        ".",
        (),
        dimensions=("Alignment", "Physics", "Style"),
    ),
    "videoscore2": Entry(
        "hyvideo.rewards.vlm_judge:VideoScore2",
        ".",
        (),
        dimensions=("VisualQuality", "TextAlignment", "Physics"),
    ),
    "yes_no": Entry("hyvideo.rewards.vlm_judge:YesNo", ".", (), dimensions=("checks",)),
    "remote": Entry(
        "hyvideo.rewards.service.client:RemoteScorer",
        ".",
        (),
        dimensions=None,
    ),
}

MAX_SCORE = 1e30  # larger scores overflow in statistics
SERVICE_ATTEMPTS = 3  # requests to each reward service before the rewards count as missing


class Scorer(Protocol):
    """A frozen model that scores videos. Subclasses need to define only ``score``.

    A scorer whose dimensions are not VQ, MQ and TA lists them in an attribute ``dimensions``. Options
    in ``free_options`` may change when a run is resumed.

    A differentiable scorer also has ``score_with_gradient(videos, prompts, *, fps) -> Tensor``,
    with the values of ``score`` in the order of ``dimensions``. Shapes: float (videos, frames,
    channels, height, width), with whole numbers in [0, 255], to (videos, dimensions).

    A scorer may also measure validation videos by more than it rewards. Of each video:
    ``held_out_each(videos, prompts) -> list[Scores]``, for which higher is better. Of the whole
    set: ``features(videos, prompts) -> Tensor`` of a part of the videos, shape (videos, dim), and
    ``held_out(features) -> Scores``, called once on one rank with float64 rows of all videos.
    """

    def score(self, videos: "list[Tensor]", prompts: list[str], *, fps: float) -> list[Scores]:
        """Return the scores of each video by dimension; a value that is not finite means that
        scoring failed.

        Shape of each video: uint8 (frames, channels, height, width).
        """

    def check_prompts(self, prompts: list[str]) -> None:
        """Raise ValueError for a prompt that cannot be scored. Called before a run starts."""


class FunctionScorer(Scorer):
    """Scorer of a plain function ``(videos, prompts, fps)``.

    The function returns one number per video, which is the dimension with the function's name; or
    a list of dicts or a dict of lists, by dimension.
    """

    def __init__(self, function: Callable, name: str, options: Mapping[str, object]):
        self.function = partial(function, **options)
        self.name = name
        self.dimensions = (name,)  # until the function answers with others
        self.__module__ = function.__module__  # of the user's code, not of this class

    def score(self, videos: "list[Tensor]", prompts: list[str], *, fps: float) -> list[Scores]:
        answer = self.function(videos, prompts, fps)
        if isinstance(answer, Mapping):
            answer = [dict(zip(answer, row)) for row in zip(*answer.values(), strict=True)]
        if hasattr(answer, "tolist"):  # a tensor or an array
            answer = answer.tolist()
        if isinstance(answer, tuple):
            answer = list(answer)
        rows = [row if isinstance(row, dict) else {self.name: row} for row in answer]
        if rows:
            self.dimensions = tuple(rows[0])
        return rows


@dataclass(frozen=True)
class ScoreResult:
    """Scores of one video, or the reason why they are missing."""

    scores: Scores
    reason: str | None = None


class ScorerUnavailable(RuntimeError):
    """Raised if a scorer is unreachable, such as a service, so that scoring the videos one by one
    would not help.
    """


@dataclass(frozen=True)
class Reward:
    """Reward of one rollout. ``total`` is NaN if the reward is missing."""

    total: float  # weighted sum of the scores
    scores: Scores  # by dimension
    reason: str | None = None  # why the reward is missing
    # prompt and frames per second that the scorers were given; None if they were not called
    asked: tuple[str, float] | None = field(default=None, compare=False)

    @property
    def is_missing(self) -> bool:
        return not math.isfinite(self.total)


def overall(scores: Scores, name: str) -> Scores:
    """Return {name: VQ + MQ + TA}, the unweighted sum for reports; empty if a dimension is not
    scored.
    """
    values = [scores.get(dimension) for dimension in DIMENSIONS]
    if not all(isinstance(value, int | float) for value in values):
        return {}
    return {name: sum(values)}


def short_names(scorers: Sequence[str]) -> dict[str, str]:
    """Return the scorers' names in metrics: the last NAME, or more of FILE.py:NAME if two scorers
    have one name.
    """
    by_length = (
        [name.rpartition(":")[2] for name in scorers],
        [Path(name).name for name in scorers],
        list(scorers),
    )
    names = next(
        names for names in by_length if len(set(names)) == len(names) or names == list(scorers)
    )
    return dict(zip(scorers, names))


def scorer_class(name: str) -> Callable:
    """Return the class of a scorer, or the function of a reward: a name in ``SCORERS``, or
    ``FILE.py:NAME`` or ``module:NAME``, which is imported.

    Raises ValueError for an unknown name, and for code that cannot be imported.
    """
    if name in SCORERS:
        return pkgutil.resolve_name(SCORERS[name].class_path)
    if ":" not in name[1:]:
        raise ValueError(
            f"reward_model must be one of {', '.join(SCORERS)}, or FILE.py:NAME, got {name!r}"
        )
    return load_object(name, "reward_model")


def known_dimensions(name: str, options: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the dimensions of a scorer before it is loaded; None if its files, an option, its
    instance or the answers of a function decide them.

    Raises ValueError like `scorer_class`.
    """
    if name in SCORERS:
        is_open = options.keys() & {"path", "rubric"}
        return None if is_open else SCORERS[name].dimensions
    declared = getattr(scorer_class(name), "dimensions", None)
    return tuple(declared) if isinstance(declared, list | tuple) else None


def make_scorer(
    name: str, root: str | Path, *, device: "str | torch.device" = "cpu", **options
) -> Scorer:
    """Load the scorer ``name`` from its folder below the checkpoint folder ``root``, or from that
    in the option path.

    A custom class or function receives ``root`` and ``device`` if it has these parameters. Raises
    ValueError like `scorer_class`, for unknown or missing options, and for files that cannot be
    used.
    """
    cls = scorer_class(name)
    if name in SCORERS:
        path = options.pop("path", None) or Path(root) / SCORERS[name].folder
        try:
            with restored_state():
                return cls(path, device=device, **options)
        except TypeError as error:
            raise ValueError(f"the options of reward model {name}: {error}") from error
    with named_errors(f"reward model {name} cannot be created", cls.__module__):
        parameters = inspect.signature(cls).parameters
        given = {"root": root, "device": device}
        options |= {key: value for key, value in given.items() if key in parameters}
        if isinstance(cls, type):
            return cls(**options)
        return FunctionScorer(cls, name.rpartition(":")[2], options)


def weighted_sum(scores: Scores, weights: Mapping[str, float]) -> float:
    """Return ``R = w_VQ VQ + w_MQ MQ + w_TA TA``, NaN if a weighted dimension is absent or not
    finite.
    """
    weights = {name: weight for name, weight in weights.items() if weight}
    if not all(is_finite(scores, name) for name in weights):
        return math.nan
    return as_score(sum(weight * scores[name] for name, weight in weights.items()))


def as_score(value: object) -> float | None:
    """Return a number of Python, NumPy or torch as a float, NaN if it is not finite or above
    MAX_SCORE; else None.
    """
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= MAX_SCORE else math.nan


def is_finite(scores: Mapping[str, object], name: str) -> bool:
    value = as_score(scores.get(name))
    return value is not None and math.isfinite(value)
