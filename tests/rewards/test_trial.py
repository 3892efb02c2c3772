"""The trial of a scorer before a run: what it refuses, and what it accepts."""

import math
import random

import pytest
import torch

from hyvideo.rewards.rewards import FunctionScorer, Scorer
from hyvideo.rewards.trial import trial_videos, try_scorer

VIDEOS = trial_videos(5, 16, 16)
PROMPT = "a red circle moves up"


def attempt(scorer, videos=VIDEOS, **options):
    return try_scorer(scorer, "mine", videos, PROMPT, fps=8.0, **options)


class Level(Scorer):
    """Scorer of the mean gray level, with changed rows."""

    dimensions = ("level",)

    def __init__(self, change=lambda rows: rows):
        self.change = change

    def score(self, videos, prompts, *, fps):
        rows = [{"level": video.float().mean().item()} for video in videos]
        return self.change(rows)


def test_a_correct_scorer_passes_without_a_warning(recwarn):
    assert attempt(Level()).keys() == {"level"}
    assert not recwarn.list


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows[:1], r"one dict per video \(2\), got a list of 1 dict"),
        (lambda rows: [{"level": math.nan} for _ in rows], "finite number for level"),
        (lambda rows: [{"gray": 1.0} for _ in rows], "finite number for level.*`dimensions`"),
    ],
)
def test_a_broken_scorer_is_refused(change, message):
    with pytest.raises(ValueError, match=f"reward mine .*{message}"):
        attempt(Level(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [{"level": 6 * random.random()} for _ in rows],
        lambda rows: [{"level": float(rank)} for rank, _ in enumerate(rows)],
    ],
    ids=["of a noisy judge", "of a judge that ranks its batch"],
)
def test_scores_may_depend_on_chance_and_on_the_batch(change):
    """TRL #4707 asks for judges of a whole group; the noise of a judge was refused."""
    assert attempt(Level(change)).keys() == {"level"}


@pytest.mark.parametrize(
    "function, names",
    [
        (lambda videos, prompts, fps: torch.stack(videos).float().mean((1, 2, 3, 4)), {"bright"}),
        (lambda videos, prompts, fps: [{"a": fps, "b": len(prompt)} for prompt in prompts], "ab"),
        (lambda videos, prompts, fps: {"a": [fps for _ in videos], "b": [1 for _ in videos]}, "ab"),
    ],
)
def test_a_function_returns_numbers_rows_or_columns(function, names):
    scorer = FunctionScorer(function, "bright", {})
    assert attempt(scorer, dimensions=list(names)).keys() == set(names)
