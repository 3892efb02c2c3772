"""Videos and prompts to scores: the scorers by name, their weights, and the reward that they add up to.

A reward of one's own is a class with the methods of `Scorer`, named by its place: ``my_rewards.py:Brightness`` or
``package.module:Brightness``. The settings' rules read this file before torch is loaded: it must not import it.
"""

import importlib.util
import inspect
import math
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hyvideo.data.outside import parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Scores = dict[str, float]

DIMENSIONS = ("VQ", "MQ", "TA")  # visual quality, motion quality, text alignment
# What records have beside the scores, under the names that no dimension can have.
RECORDED = "number prompt seed iteration group member file reward reward_std advantage missing reason mean std".split()


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
    """A frozen model that scores videos. A class that inherits from this one needs ``score`` alone.

    One whose dimensions are not VQ, MQ and TA names them in an attribute ``dimensions``.
    """

    def score(self, videos: "list[Tensor]", prompts: list[str], *, fps: float) -> list[Scores]:
        """Scores of each video by dimension; a value that is not finite means "could not score".

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


def overall(scores: Scores, name: str) -> Scores:
    """VQ + MQ + TA under ``name``, whatever the weights: the reported figure; empty where one is not scored."""
    values = [scores.get(dimension) for dimension in DIMENSIONS]
    return {name: sum(values)} if all(isinstance(value, int | float) for value in values) else {}


def parse_options(text: str) -> dict:
    """The scorer's options of a flag --options. Raises ValueError for text that is no JSON object of options."""
    try:
        options = parse_json(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(f"--options must be a JSON object, got {text:.200}")
    if refused := sorted(options.keys() & {*NOT_OPTIONS}):
        raise ValueError(f"a scorer's options cannot have {', '.join(refused)}; its folder is the option path")
    return options


def scorer_class(name: str) -> type:
    """The class of a scorer, by its name in ``SCORERS`` or ``FILE.py:CLASS`` or ``MODULE:CLASS``, whose code is run.

    Raises ValueError for an unknown name, and for code that cannot be run or has no such class.
    """
    if name in SCORERS:
        return pkgutil.resolve_name(SCORERS[name].class_path)
    place, _, class_name = name.rpartition(":")
    if not place:
        raise ValueError(f"reward_model must be one of {', '.join(SCORERS)}, or FILE.py:CLASS, got {name!r}")
    try:
        module = _run(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
        cls = getattr(module, class_name)
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        raise ValueError(f"reward_model {name} must name a class that can be loaded: {error}") from error
    lacks = [method for method in ("score", "check_prompts", "held_out") if not hasattr(cls, method)]
    if lacks or not isinstance(cls, type):
        got = f"one without {', '.join(lacks)}" if isinstance(cls, type) else f"{cls!r:.80}"
        hint = f"one that inherits from Scorer of {__name__} needs score alone"
        raise ValueError(f"reward_model {name} must be a class with all methods of a scorer, got {got}; {hint}")
    return cls


@cache
def _run(file: Path) -> types.ModuleType:
    """The module of a file, which is run once."""
    spec = importlib.util.spec_from_file_location(str(file), file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # a dataclass looks for its module there
    spec.loader.exec_module(module)
    return module


def code_files(names: Iterable[str]) -> list[Path]:
    """The files with the code of those scorers that do not ship with this project."""
    places = [name.rpartition(":")[0] for name in names if ":" in name]
    return [Path(p if p.endswith(".py") else importlib.util.find_spec(p).origin) for p in places]


def make_scorer(name: str, root: str | Path, *, device: "str | torch.device" = "cpu", **options) -> Scorer:
    """The scorer called ``name``, with its files below the checkpoint folder ``root``, or in that of the option path.

    A class that does not ship gets ``root`` and ``device`` where its constructor takes them. Raises ValueError as
    `scorer_class`, for options that the class does not have or lacks, and files that cannot be used.
    """
    cls, entry = scorer_class(name), SCORERS.get(name)
    parameters = inspect.signature(cls).parameters
    known = {key for key, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {*NOT_OPTIONS}
    known |= {"path"} if entry else set()
    if unknown := sorted(set(options) - known):
        raise ValueError(f"reward model {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    if wrong := [f"{key} {value!r:.60}" for key, value in options.items() if not _fits(value, parameters.get(key))]:
        raise ValueError(f"reward model {name} has options of another type, got {', '.join(wrong)}")
    if entry:
        return cls(options.pop("path", None) or Path(root) / entry.folder, device=device, **options)
    if lacking := [key for key in known - options.keys() if parameters[key].default is inspect.Parameter.empty]:
        raise ValueError(f"reward model {name} needs the option {', '.join(sorted(lacking))}")
    return cls(**options, **{key: v for key, v in (("root", root), ("device", device)) if key in parameters})


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
