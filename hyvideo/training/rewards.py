"""The rewards of a run: which scorers the settings ask for, and when too many of their rewards are missing."""

import os
import warnings

import torch

from hyvideo.config.command_line import reward_options
from hyvideo.config.settings import Config
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import Scorer, check_options, make_scorer
from hyvideo.models.reward_models.scorer_check import check_scorer, has_failed, lines
from hyvideo.models.reward_models.trial_clips import Trial, synthetic_trial


def make_async_scorer(config: Config, device: torch.device, scorers: dict[str, Scorer] | None = None) -> AsyncScorer:
    """The judge of a run; its scorers are loaded on ``device``, or are services, unless they are given.

    Raises: ValueError for scorers or options that cannot be used.
    """
    settings = config.reward
    return AsyncScorer(
        _make_scorers(config, device) if scorers is None else scorers,
        config.reward_weights,
        retries=settings.reward_retries,
        through_file=settings.reward_video == "file",
        num_threads=config.model.num_threads,
        offload=settings.reward_offload,
        device=device,
    )


def _make_scorers(config: Config, device: torch.device) -> dict[str, Scorer]:
    settings = config.reward
    if settings.remote_reward_url:
        from hyvideo.models.reward_models.service.client import RemoteScorer

        urls = [url.strip() for url in settings.remote_reward_url.split(",")]
        token = os.environ.get("REWARD_SERVER_TOKEN")
        return {"remote": RemoteScorer(urls, token=token, timeout=settings.remote_reward_timeout)}
    root = config.model.pretrained_model_root
    options = reward_options(settings)
    for given in options.values():
        check_options(given)
    return {name: make_scorer(name, root, device=device, **given) for name, given in options.items()}


def try_scorers(config: Config, judge: AsyncScorer, prompt: str) -> None:
    """Scores one clip of the run's size a few times: complete, finite, repeatable, a batch like a clip alone.

    Raises: ValueError with what a scorer got wrong. Differences that rounding may explain are warnings.
    """
    data = config.data
    clip = synthetic_trial(data.sample_n_frames, data.height, data.width, data.fps)
    for name, scorer in judge.scorers.items():
        # One scorer must have every dimension that counts; of several each must have what it promises.
        needed = [one for one, weight in config.reward_weights.items() if weight] if len(judge.scorers) == 1 else None
        checks = check_scorer(scorer, Trial(clip.video, prompt, data.fps), dimensions=needed, quick=True)
        told = "\n".join(lines([check for check in checks if check.state != "ok"]))
        if has_failed(checks):
            raise ValueError(f"reward {name} cannot be trained with; scripts/check_reward.py says more:\n{told}")
        if told:
            warnings.warn(f"reward {name}:\n{told}", stacklevel=2)


def refuse_too_many_missing(
    config: Config, metrics: dict[str, float], reason: str | None, num_rollouts: int, iteration: int
) -> None:
    """Raises RuntimeError, on all ranks alike, when more rewards of a round are missing than is allowed."""
    missing, limit = metrics["reward/missing"], config.reward.max_missing_fraction
    if missing <= limit * num_rollouts:
        return
    raise RuntimeError(
        f"{missing:.0f} of {num_rollouts} rewards of iteration {iteration} are missing, more than "
        f"max_missing_fraction {limit} allows; the policy was not changed. One of them: {reason or 'no reason given'}"
    )
