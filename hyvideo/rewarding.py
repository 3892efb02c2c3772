"""The rewards of a run: which scorers the settings ask for, and when too many of their rewards are missing."""

import torch

from hyvideo.config import Config
from hyvideo.models.reward_models.judge import Judge
from hyvideo.models.reward_models.rewards import Reward, Scorer, make_scorer


def make_judge(config: Config, device: torch.device, scorers: dict[str, Scorer] | None = None) -> Judge:
    """The judge of a run; its scorers are loaded on ``device`` unless they are given.

    Raises: ValueError for scorers or options that cannot be used.
    """
    settings = config.reward
    if scorers is None:
        root = config.model.pretrained_model_root
        scorers = {
            name: make_scorer(name, root, device=device, **options) for name, options in config.reward_options.items()
        }
    return Judge(
        scorers,
        config.reward_weights,
        retries=settings.reward_retries,
        through_file=settings.reward_video == "file",
        num_threads=config.model.num_threads,
        offload=settings.reward_offload,
    )


def refuse_too_many_missing(
    config: Config, metrics: dict[str, float], rewards: list[Reward], num_rollouts: int, iteration: int
) -> None:
    """Raises RuntimeError, on all ranks alike, when more rewards of a round are missing than is allowed."""
    missing, limit = metrics["reward/missing"], config.reward.max_missing_fraction
    if missing <= limit * num_rollouts:
        return
    reasons = list(dict.fromkeys(reward.reason for reward in rewards if reward.reason))
    raise RuntimeError(
        f"{missing:.0f} of {num_rollouts} rewards of iteration {iteration} are missing, more than "
        f"max_missing_fraction {limit} allows; the policy was not changed. On this rank: {'; '.join(reasons) or 'none'}"
    )
