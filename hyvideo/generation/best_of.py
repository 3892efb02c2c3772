"""Best of n: several candidates of a video are sampled and scored, and the one with the highest
reward is kept.

Candidate 0 has the noise that the video has without candidates. Offloaded scorers are on the GPU
only while they score, when an offloaded transformer is on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyvideo.generation.stored_latents import Sampled
from hyvideo.generation.videos import Video
from hyvideo.models.placement import Placement
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.run_files import or_none
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.settings.config import Config
from hyvideo.training.rewards import make_async_scorer, try_scorers


@dataclass(frozen=True)
class BestOf:
    """Number of candidates of each video, and the scorers that choose among them."""

    count: int
    scorer: AsyncScorer
    fps: float
    decode_batch_size: int = 1

    def choose(
        self, sample: Callable[[int], Tensor], pipeline: GRPOPipeline, prompt: str
    ) -> Sampled:
        """Return the best of the candidates that ``sample`` returns by number, shape (1, channels,
        ...) each; candidate 0, with a problem, if none has a reward.
        """
        latents = [sample(number) for number in range(self.count)]
        videos = pipeline.decode(torch.cat(latents), batch_size=self.decode_batch_size)
        pending = self.scorer.submit((videos, [prompt] * len(videos)), fps=self.fps)
        rewards = self.scorer.collect([pending], lambda is_done: is_done)
        scored = [number for number, reward in enumerate(rewards) if not reward.is_missing]
        best = max(scored, key=lambda number: rewards[number].total, default=0)
        problem = None if scored else rewards[0].reason
        record = {"chosen": best, "rewards": [_entry(reward) for reward in rewards]}
        return Sampled(latents[best], record, problem=problem)


def make_best_of(
    config: Config, count: int, videos: list[Video], device: torch.device, placement: Placement
) -> BestOf:
    """Load the scorers of ``reward_model`` and try them on a video.

    Raises ValueError if one cannot score a prompt or fails.
    """
    config = config.with_settings(
        valid_video_csv=[], height=videos[0].height, width=videos[0].width
    )
    scorer = make_async_scorer(config, device, placement=placement)
    prompts = [video.request.prompt for video in videos]
    scorer.check_prompts(prompts)
    try_scorers(scorer, config.data, prompts[0])
    return BestOf(count, scorer, config.data.fps, config.rollout.decode_batch_size)


def _entry(reward: Reward) -> dict[str, Any]:
    """Return what the JSON file records of a candidate."""
    return {
        "reward": or_none(reward.total),
        "scores": {str(name): or_none(value) for name, value in reward.scores.items()},
        "reason": reward.reason,
    }
