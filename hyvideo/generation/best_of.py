"""Best of n: several candidates of a video are sampled and scored, and the one with the highest
reward is kept.

Candidate 0 has the noise that the video has without candidates. Offloaded scorers are on the GPU
only while they score, when an offloaded transformer is on the CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyvideo.data.prompts import Request
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.run_files import or_none
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.config import Config
from hyvideo.training.rewards import make_async_scorer


@dataclass(frozen=True)
class Choice:
    """The best candidate of a video: its latents, and what the JSON file of the video records of
    all candidates.
    """

    latents: Tensor  # (1, channels, frames, height, width)
    record: dict[str, Any]


@dataclass(frozen=True)
class BestOf:
    """Number of candidates of each video, and the scorers that choose among them."""

    count: int
    scorer: AsyncScorer
    fps: float
    reward_model: list[str]
    decode_batch_size: int = 1

    def choose(
        self, sample: Callable[[int], Tensor], pipeline: GRPOPipeline, prompt: str
    ) -> Choice:
        """Return the best of the candidates that ``sample`` returns by number, shape (1, channels,
        ...) each.

        Raises ValueError if no candidate has a reward.
        """
        latents = [sample(number) for number in range(self.count)]
        videos = pipeline.decode(torch.cat(latents), batch_size=self.decode_batch_size)
        pending = self.scorer.submit((videos, [prompt] * len(videos)), fps=self.fps)
        rewards = self.scorer.collect([pending], lambda is_done: is_done)
        totals = [reward.total for reward in rewards]
        best = max(
            range(self.count),
            key=lambda number: -math.inf if math.isnan(totals[number]) else totals[number],
        )
        if math.isnan(totals[best]):
            raise ValueError(
                f"--best_of needs the reward of at least one candidate, got none of {self.count}; "
                f"first reason: {rewards[0].reason}"
            )
        record = {
            "candidates": self.count,
            "chosen": best,
            "reward_model": self.reward_model,
            "reward_weights": {str(name): weight for name, weight in self.scorer.weights.items()},
            "rewards": [_entry(reward) for reward in rewards],
        }
        return Choice(latents[best], record)


def make_best_of(
    config: Config, count: int, requests: list[Request], device: torch.device, *, offload: bool
) -> BestOf:
    """Load the scorers of ``reward_model``. Raises ValueError if one cannot score a prompt."""
    config = config.with_settings(
        held_out_reward_model=[], valid_video_csv=[], reward_offload=offload
    )
    scorer = make_async_scorer(config, device)
    scorer.check_prompts([request.prompt for request in requests])
    return BestOf(
        count, scorer, config.data.fps, config.reward.reward_model, config.rollout.decode_batch_size
    )


def _entry(reward: Reward) -> dict[str, Any]:
    """Return what the JSON file records of a candidate."""
    return {
        "reward": or_none(reward.total),
        "scores": {str(name): or_none(value) for name, value in reward.scores.items()},
        "reason": reward.reason,
    }
