"""Videos and prompts to scores: the scorers by name, their weights, and what is done when one fails.

A new reward is one class with one method and one line in ``SCORERS``.
"""

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Scores = dict[str, float]

# name -> where its class is; imported when it is asked for, so that a run loads one scorer and its packages only
SCORERS = {"miniature": "hyvideo.miniature.reward:MiniatureScorer"}


class Scorer(Protocol):
    """A frozen judge of videos."""

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[Scores]:
        """One dict per video with the dimensions VQ, MQ and TA; a value that is not finite means "could not score".

        Args:
            videos: uint8. Shape of each: (frames, channels, height, width).
        """

    def check_prompts(self, prompts: list[str]) -> None:
        """Raises ValueError for a prompt that could not be scored, before a run begins."""

    def held_out(self, videos: list[Tensor], prompts: list[str]) -> Scores:
        """Measures of a whole set of videos that are never part of the reward, for validation. May be empty."""


@dataclass(frozen=True)
class Reward:
    """What one rollout got. ``total`` is NaN where the reward is missing, never a number in its place."""

    total: float
    scores: Scores

    @property
    def is_missing(self) -> bool:
        return not math.isfinite(self.total)

    @property
    def overall(self) -> float:
        """VQ + MQ + TA, whatever the weights: the figure that is reported."""
        return sum(self.scores.get(dimension, math.nan) for dimension in ("VQ", "MQ", "TA"))


def make_scorer(name: str, root: str) -> Scorer:
    """The scorer called ``name``, with its files below the checkpoint folder ``root``."""
    if name not in SCORERS:
        raise ValueError(f"reward_model must be one of {', '.join(SCORERS)}, got {name!r}")
    module, _, class_name = SCORERS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)(root)


def rewards_of(scores: Iterable[Scores], weights: dict[str, float]) -> list[Reward]:
    """``R = w_VQ VQ + w_MQ MQ + w_TA TA``; a dimension that is absent or not finite makes the reward missing."""
    return [Reward(_weighted(one, weights), one) for one in scores]


def _weighted(scores: Scores, weights: dict[str, float]) -> float:
    total = sum(weight * scores.get(dimension, math.nan) for dimension, weight in weights.items() if weight)
    return total if math.isfinite(total) else math.nan
