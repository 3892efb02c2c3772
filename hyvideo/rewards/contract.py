"""The contract between a run and a scorer: every call of a scorer's methods passes through this
file.

    given     new lists, and for a custom scorer copies of the videos, so that it may change both
    returned  one row per video; names that no record uses; numbers, NaN if not finite or above MAX_SCORE
    left      settings of torch and of the process are restored (`restored_state`)

A custom scorer costs one more copy of the videos that it scores: 151 MB and 0.24 s on one core of a
CPU (measured) for 121 frames of 480 x 864. The shipped scorers receive the videos themselves.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from hyvideo.files.custom_code import check_tensor, named_errors, restored_state
from hyvideo.files.text import quote, shorten
from hyvideo.rewards.rewards import (
    DIMENSIONS,
    OVERALL,
    RESERVED_NAMES,
    Scorer,
    ScoreResult,
    Scores,
    as_score,
)

BUILT_IN = "held_out/"  # prefix of the metrics that a run measures itself


def score(
    scorer: Scorer, videos: Sequence[Tensor], prompts: Sequence[str], *, fps: float
) -> list[ScoreResult]:
    """Return the scores of each video.

    Raises ValueError for another number of rows or unusable names and values.
    """
    with restored_state():
        rows = scorer.score(_given(scorer, videos), list(prompts), fps=fps)
    return check_rows(rows, len(videos), "score", "a dimension", RESERVED_NAMES)


def score_with_gradient(
    scorer: Scorer, videos: Tensor, prompts: Sequence[str], *, fps: float
) -> Tensor:
    """Return the scores of videos by dimension, with their gradient. Shape: (videos, dimensions).

    Raises ValueError for another shape, and for scores without a gradient.
    """
    with restored_state():
        scores = scorer.score_with_gradient(videos, list(prompts), fps=fps)
    what = f"the result of score_with_gradient of {type(scorer).__name__}"
    check_tensor(scores, (len(videos), len(declared_dimensions(scorer))), what)
    if not scores.requires_grad:
        raise ValueError(
            f"{what} must have a gradient, got a tensor that is detached from the videos; "
            "compute it without no_grad, detach, item, numpy and integer types"
        )
    return scores


def held_out_each(scorer: Scorer, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Scores]:
    """Return the held-out metrics of each video; raises like `score`."""
    with restored_state():
        rows = scorer.held_out_each(_given(scorer, videos), list(prompts))
    reserved = (*RESERVED_NAMES, OVERALL)
    results = check_rows(rows, len(videos), "held_out_each", "a held-out metric", reserved)
    return [result.scores for result in results]


def features(scorer: Scorer, videos: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
    """Return what `held_out` needs of each video. Shape: (videos, dim).

    Raises ValueError for another shape.
    """
    with restored_state():
        rows = scorer.features(_given(scorer, videos), list(prompts))
    check_tensor(rows, (len(videos), None), f"the result of features of {type(scorer).__name__}")
    return rows


def held_out(scorer: Scorer, features: Tensor) -> Scores:
    """Return the held-out metrics of a set of videos with these features; raises like `score`."""
    with restored_state():
        metrics = scorer.held_out(features)
    if not isinstance(metrics, dict):
        raise ValueError(f"held_out must return a dict of numbers, got {type(metrics).__name__}")
    check_names(metrics, "a held-out metric", (*RESERVED_NAMES, OVERALL))
    return _numbers_of(metrics)


def check_prompts(scorer: Scorer, prompts: Sequence[str]) -> None:
    """Raise ValueError if the scorer cannot score one of the prompts."""
    if scorer.__module__.startswith("hyvideo."):
        scorer.check_prompts(list(prompts))
        return
    with named_errors(f"check_prompts of {type(scorer).__name__}", scorer.__module__):
        scorer.check_prompts(list(prompts))


def declared_dimensions(scorer: Scorer) -> tuple[str, ...]:
    """Return the dimensions that a scorer declares, VQ, MQ and TA if it does not."""
    declared = getattr(scorer, "dimensions", DIMENSIONS)
    return (declared,) if isinstance(declared, str) else tuple(declared)


def check_rows(
    rows: object, num_videos: int, method: str, what: str, reserved: Collection[str]
) -> list[ScoreResult]:
    """Return the numbers in the answer of a scorer's method, one row per video.

    ``what`` its names stand for, and which are ``reserved``. Raises ValueError for another number
    of rows, unusable names, and arrays in place of numbers.
    """
    expected = f"{method} must return a list with one dict per video ({num_videos})"
    if not isinstance(rows, list):
        raise ValueError(f"{expected}, got {type(rows).__name__}")
    if len(rows) != num_videos or not all(isinstance(row, dict | ScoreResult) for row in rows):
        types = sorted({type(row).__name__ for row in rows})
        raise ValueError(f"{expected}, got a list of {len(rows)} {' or '.join(types)}".rstrip())
    results = []
    for row in rows:
        result = ScoreResult(row) if isinstance(row, dict) else row
        check_names(result.scores, what, reserved)
        reason = shorten(str(result.reason)) if result.reason else None
        results.append(ScoreResult(_numbers_of(result.scores), reason))
    return results


def check_names(
    names: Collection[object], what: str, reserved: Collection[str] = RESERVED_NAMES
) -> None:
    """Raise ValueError for a name that is no printable text, or that is reserved."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or name in reserved:
            raise ValueError(
                f"the name of {what} must be printable text and none of {', '.join(reserved)}, got "
                f"{quote(name)}"
            )
        if name.startswith(BUILT_IN):
            raise ValueError(
                f"the name of {what} must not begin with {BUILT_IN}, got {quote(name)}"
            )


def _numbers_of(values: Mapping[str, object]) -> Scores:
    """Return the numbers among named values, like `as_score`.

    Raises ValueError for an array of several numbers.
    """
    numbers = {}
    for name, value in values.items():
        number = as_score(value)
        if number is not None:
            numbers[name] = number
        elif hasattr(value, "shape"):
            raise ValueError(
                f"the score {name} must be one number, got {type(value).__name__} of shape "
                f"{tuple(value.shape)}"
            )
    return numbers


def _given(scorer: Scorer, videos: Sequence[Tensor]) -> list[Tensor]:
    if scorer.__module__.startswith("hyvideo."):
        return list(videos)
    return [video.clone() for video in videos]
