"""The contract between a run and a scorer: every call of a scorer's methods passes through this
file.

    given     new lists, and for a custom scorer copies of the videos, so that it may change both
    returned  one row per video; names that no record uses; numbers, NaN if not finite or above MAX_SCORE
    left      settings of torch and of the process are restored (`process_state`)

A custom scorer costs one more copy of the videos that it scores: 151 MB and 0.24 s on one core of a
CPU (measured) for 121 frames of 480 x 864. The shipped scorers receive the videos themselves; the
check before a run compares them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from hyvideo.data.text import describe_error, quote, shorten
from hyvideo.rewards.process_state import restored_state
from hyvideo.rewards.rewards import (
    DIMENSIONS,
    OVERALL,
    RESERVED_NAMES,
    Scorer,
    ScoreResult,
    Scores,
    SetMeasure,
    as_score,
)

BUILT_IN = "held_out/"  # prefix of the metrics that a run measures itself


def score(
    scorer: Scorer, videos: Sequence[Tensor], prompts: Sequence[str], *, fps: float
) -> list[ScoreResult]:
    """Return the scores of each video.

    Raises ValueError for another number of rows or unusable names and values.
    """
    with restored_state(_owner(scorer)):
        rows = scorer.score(_given(scorer, videos), list(prompts), fps=fps)
        _check_rows(rows, len(videos), "score", (dict, ScoreResult))
        results = [row if isinstance(row, ScoreResult) else ScoreResult(row) for row in rows]
        return [_cleaned(result) for result in results]


def score_with_gradient(
    scorer: Scorer, videos: Tensor, prompts: Sequence[str], *, fps: float
) -> Tensor:
    """Return the scores of videos by dimension, with their gradient. Shape: (videos, dimensions).

    Raises ValueError for another shape, and for scores without a gradient.
    """
    with restored_state(_owner(scorer)):
        scores = scorer.score_with_gradient(videos, list(prompts), fps=fps)
    shape = (len(videos), len(declared_dimensions(scorer)))
    what = f"score_with_gradient of {_owner(scorer)} must return"
    if not isinstance(scores, Tensor) or scores.shape != shape:
        got = (
            f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        )
        raise ValueError(f"{what} a tensor of shape (videos, dimensions), here {shape}, got {got}")
    if not scores.requires_grad:
        raise ValueError(
            f"{what} scores with a gradient, got a tensor that is detached from the videos; "
            "compute it without no_grad, detach, item, numpy and integer types"
        )
    return scores


def held_out_each(scorer: Scorer, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Scores]:
    """Return the held-out metrics of each video, without any if the scorer has no such method;
    raises like `score`.
    """
    if not hasattr(scorer, "held_out_each"):
        return [{} for _ in videos]
    with restored_state(_owner(scorer)):
        rows = scorer.held_out_each(_given(scorer, videos), list(prompts))
        _check_rows(rows, len(videos), "held_out_each", (dict,))
        for row in rows:
            check_names(row, "a held-out metric", reserved=(*RESERVED_NAMES, OVERALL))
        return [numbers_of(row) for row in rows]


def held_out(
    scorer: Scorer, videos: Sequence[Tensor], prompts: Sequence[str]
) -> dict[str, SetMeasure]:
    """Return the held-out metrics of the set of videos, whose functions return floats; raises like
    `score`.
    """
    with restored_state(_owner(scorer)):
        measures = scorer.held_out(_given(scorer, videos), list(prompts))
        if not isinstance(measures, dict):
            raise ValueError(
                f"held_out must return a dict of SetMeasure, got {type(measures).__name__}"
            )
        check_names(measures, "a held-out metric", reserved=(*RESERVED_NAMES, OVERALL))
        return {name: _checked(name, measure, len(videos)) for name, measure in measures.items()}


def check_prompts(scorer: Scorer, prompts: Sequence[str]) -> None:
    """Raise ValueError if the scorer cannot score one of the prompts."""
    with restored_state(_owner(scorer)):
        scorer.check_prompts(list(prompts))


def declared_dimensions(scorer: Scorer) -> tuple[str, ...]:
    """Return the dimensions that a scorer declares, VQ, MQ and TA if it does not."""
    declared = getattr(scorer, "dimensions", DIMENSIONS)
    return (declared,) if isinstance(declared, str) else tuple(declared)


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


def numbers_of(values: Mapping[str, object]) -> Scores:
    """Return the numbers among named values, like `as_score`.

    Raises ValueError for an array of several numbers.
    """
    numbers = {name: as_score(value) for name, value in values.items()}
    for name, number in numbers.items():
        if number is None and hasattr(values[name], "shape"):
            raise ValueError(
                f"the score {name} must be one number, got {type(values[name]).__name__} "
                f"{quote(values[name], 60)[1:-1]}"
            )
    return {name: number for name, number in numbers.items() if number is not None}


def _owner(scorer: Scorer) -> str:
    return f"the scorer {type(scorer).__name__}"


def _given(scorer: Scorer, videos: Sequence[Tensor]) -> list[Tensor]:
    is_shipped = type(scorer).__module__.partition(".")[0] == "hyvideo"
    return list(videos) if is_shipped else [video.clone() for video in videos]


def _check_rows(rows: object, num_videos: int, method: str, types: tuple[type, ...]) -> None:
    is_list = isinstance(rows, list)
    if is_list and len(rows) == num_videos and all(isinstance(row, types) for row in rows):
        return
    found = " or ".join(sorted({type(row).__name__ for row in rows})) if is_list else ""
    got = f"a list of {len(rows)} {found}".rstrip() if is_list else type(rows).__name__
    raise ValueError(
        f"{method} must return a list with one dict per video ({num_videos}), got {got}"
    )


def _cleaned(result: ScoreResult) -> ScoreResult:
    check_names(result.scores, "a dimension")
    return ScoreResult(numbers_of(result.scores), result.reason and shorten(str(result.reason)))


def _checked(name: str, measure: object, num_videos: int) -> SetMeasure:
    if not isinstance(measure, SetMeasure):
        raise ValueError(
            f"held_out must return a dict of SetMeasure, got {type(measure).__name__} for {name}; "
            "return metrics of single videos from held_out_each"
        )
    rows = measure.rows
    if (
        not isinstance(rows, Tensor)
        or rows.ndim != 2
        or len(rows) != num_videos
        or rows.is_complex()
    ):
        got = f"shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(
            f"the rows of {name} must be a real tensor of shape ({num_videos}, dim), got {got}"
        )
    return SetMeasure(rows, partial(_number_of_set, name, measure.of_set))


def _number_of_set(name: str, of_set: Callable[[Tensor], object], rows: Tensor) -> float:
    """Return the metric of a set as a float, NaN if it is not finite.

    Raises ValueError for anything but a number.
    """
    try:
        with restored_state(f"of_set of {name}"):
            value = of_set(rows.clone())
    except (Exception, SystemExit) as error:  # a scorer may raise anything
        raise ValueError(f"of_set of {name} raises {describe_error(error)}") from error
    number = as_score(value)
    if number is None:
        raise ValueError(
            f"of_set of {name} must return one number, got {type(value).__name__} "
            f"{quote(value, 60)}"
        )
    return number if math.isfinite(number) else math.nan
