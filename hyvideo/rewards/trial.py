"""The trial of a scorer before a run, on videos of the run's size: its scores are complete, and do
not depend on the other videos of a batch.
"""

import json
import math
import warnings
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.data.custom_code import named_errors
from hyvideo.data.text import describe_error, nearest, quote
from hyvideo.rewards import contract
from hyvideo.rewards.rewards import Scorer, Scores, as_score, is_finite
from hyvideo.rewards.scoring import try_score

EXACT = 1e-4  # rounding differences of float32 between a batch and a single video
# Smaller differences above EXACT are warnings; the noise of VideoAlign in bf16 is about half of 0.07.
TOLERANCE = 0.1


def trial_videos(num_frames: int, height: int, width: int) -> list[Tensor]:
    """Return two different videos of moving patterns, the same in every run.

    Shape of each: uint8 (frames, 3, height, width).
    """
    generator = torch.Generator().manual_seed(0)
    videos = []
    for brightness in (1.0, 0.6):
        coarse = brightness * torch.rand(1, 3, 8, 8, generator=generator)
        picture = (255 * F.interpolate(coarse, (height, width), mode="bilinear")[0]).byte()
        frames = [picture.roll(2 * frame, dims=-1) for frame in range(num_frames)]
        videos.append(torch.stack(frames))
    return videos


def try_scorer(
    scorer: Scorer,
    name: str,
    videos: list[Tensor],
    prompt: str,
    *,
    fps: float,
    dimensions: Collection[str] | None = None,  # that must be scored; by default the declared ones
) -> Scores:
    """Score two videos together and the second one alone, and return the scores of the first.

    Raises ValueError if the scorer fails, lacks a dimension, or scores a video differently in a
    batch. Warns of smaller differences, and of equal scores for both videos.
    """
    dimensions = dimensions or contract.declared_dimensions(scorer)
    _check_prompt(scorer, name, prompt)
    first, second = _scores(scorer, name, videos, prompt, fps)
    (alone,) = _scores(scorer, name, videos[1:], prompt, fps)
    for scores in (first, second, alone):
        _check_dimensions(scorer, name, scores, dimensions)

    declared = as_score(getattr(scorer, "noise", 0.0))
    if declared is None:
        raise ValueError(f"`noise` of reward {name} must be a number, got {quote(scorer.noise)}")
    noise = max(TOLERANCE, declared)
    for dimension in dimensions:
        together = second[dimension]
        single = alone[dimension]
        difference = f"{dimension} of one video is {together:.4g} in a batch and {single:.4g} alone"
        if not math.isclose(together, single, rel_tol=0.05, abs_tol=noise):
            raise ValueError(
                f"reward {name} must not depend on the other videos of a batch, their order or "
                f"chance, got: {difference}; if this is noise, set `noise` of the class to its size"
            )
        if not math.isclose(together, single, rel_tol=EXACT, abs_tol=EXACT):
            message = f"reward {name}: {difference}; smaller differences are noise"
            warnings.warn(message, stacklevel=2)
    if all(first[dimension] == second[dimension] for dimension in dimensions):
        values = ", ".join(f"{dimension} {first[dimension]:.4g}" for dimension in dimensions)
        warnings.warn(f"reward {name} is the same for two different videos: {values}", stacklevel=2)
    return first


def _check_prompt(scorer: Scorer, name: str, prompt: str) -> None:
    with named_errors(f"reward {name} cannot score the prompt {quote(prompt)}", scorer.__module__):
        contract.check_prompts(scorer, [prompt])


def _scores(
    scorer: Scorer, name: str, videos: list[Tensor], prompt: str, fps: float
) -> list[Scores]:
    results = try_score(scorer, videos, [prompt] * len(videos), fps=fps)
    if isinstance(results, BaseException):
        raise ValueError(
            f"reward {name} fails on {len(videos)} videos of the run's size: "
            f"{describe_error(results)}"
        )
    for result in results:
        if result.reason:
            raise ValueError(f"reward {name} returns no scores: {result.reason}")
    return [result.scores for result in results]


def _check_dimensions(
    scorer: Scorer, name: str, scores: Scores, dimensions: Collection[str]
) -> None:
    absent = [dimension for dimension in dimensions if not is_finite(scores, dimension)]
    if not absent:
        return
    found = [dimension for dimension in scores if is_finite(scores, dimension)]
    hint = nearest(absent[0], found)
    declared = getattr(scorer, "dimensions", None)
    if declared is None or isinstance(declared, str):
        hint = f"the class needs a tuple `dimensions`: write dimensions = {tuple(found)}"
    elif found and not hint:
        weights = json.dumps(dict.fromkeys(found, 1))
        hint = f"weight what it returns, such as with reward_weights '{weights}'"
    raise ValueError(
        f"reward {name} must return a finite number for {', '.join(absent)}, got {scores}; "
        f"{hint or 'check its code'}"
    )
