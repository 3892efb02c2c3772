"""The trial of a scorer before a run, on videos of the run's size: its scores are complete."""

import json
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.files.text import describe_error, nearest
from hyvideo.rewards import contract
from hyvideo.rewards.rewards import Scorer, Scores, is_finite
from hyvideo.rewards.scoring import try_score


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
    """Score videos of a prompt once, and return the scores of the first.

    Scores may depend on chance, and on the other videos: a judge may rank a batch. Raises
    ValueError if the scorer fails, or if a dimension of a video has no finite score.
    """
    results = try_score(scorer, videos, [prompt] * len(videos), fps=fps)
    if isinstance(results, Exception):
        raise ValueError(
            f"reward {name} fails on {len(videos)} videos of the run's size: "
            f"{describe_error(results)}"
        )
    for result in results:
        if result.reason:
            raise ValueError(f"reward {name} returns no scores: {result.reason}")
        for dimension in dimensions or contract.declared_dimensions(scorer):
            if not is_finite(result.scores, dimension):
                weights = json.dumps(dict.fromkeys(result.scores, 1))
                hint = nearest(dimension, result.scores) or (
                    f"weight what it returns, such as --reward_weights '{weights}'; a class also "
                    "declares it in `dimensions`"
                )
                raise ValueError(
                    f"reward {name} must return a finite number for {dimension}, got "
                    f"{result.scores}; {hint}"
                )
    return results[0].scores
