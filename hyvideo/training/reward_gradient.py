"""Reward gradients: the loss term ``-weight mean R(decode(x0_hat))``, added to an objective on
noise levels.

    latents before the last step -> velocity -> x0_hat = x - sigma v -> decoder -> scorers -> weighted sum R

The reward step is the last one of a rollout (DRaFT-1, Clark et al. 2023, arXiv:2309.17400). The
chain rule is applied in three parts, each of which frees its memory before the next: the gradient
of R by the video, of the video by x0_hat, and of x0_hat by the weights, in the pass of the update.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyvideo.data.videos import to_levels
from hyvideo.loss.nft import mean_square, relative_norm
from hyvideo.models import decoding
from hyvideo.models.offload import on_device
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.rewards import contract
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.rewards.trial import trial_videos
from hyvideo.schedulers.schedule import filled
from hyvideo.settings.sections import DataSettings
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.on_policy_check import Limited, check_limits
from hyvideo.training.rollout_batch import RolloutBatch, select

# Largest difference between a rollout's reward and the reward of the pass with gradient, if arithmetic is
# exact or rounded.
EXACT_REWARD, ROUNDED_REWARD = 1e-3, 0.5
# Largest share of the rewards of a pass without a finite gradient; with more, the scorer is wrong.
MAX_MISSING = 0.5


class LatentRewards(NamedTuple):
    """Rewards of latents and their gradients, both detached."""

    rewards: Tensor  # (rows,), NaN where the reward or its gradient is not finite
    gradients: Tensor  # (rows, channels, frames, height, width), 0 where the reward is NaN


class RewardGradient:
    """The reward of latents as a function with a gradient: VAE, scorers and their weights."""

    def __init__(
        self,
        pipeline: GRPOPipeline,
        scorer: AsyncScorer,
        *,
        fps: float,  # frames per second of the videos
        batch_size: int,  # videos that are decoded and scored together
    ):
        self.pipeline = pipeline
        self.scorer = scorer
        self.fps = fps
        self.batch_size = batch_size

    def __call__(self, latents: Tensor, prompts: Sequence[str]) -> LatentRewards:
        """Return the rewards of decoded latents and their gradients by the latents."""
        parts = []
        for start in range(0, len(latents), self.batch_size):
            rows = slice(start, start + self.batch_size)
            batch = latents[rows].detach()
            of_batch = partial(self._of_batch, batch, list(prompts[rows]))
            parts.append(decoding.with_smaller_tiles(self.pipeline.vae, batch, of_batch))
        return LatentRewards(*(torch.cat(each) for each in zip(*parts)))

    @torch.enable_grad()
    def _of_batch(self, latents: Tensor, prompts: list[str]) -> LatentRewards:
        latents = latents.clone().requires_grad_()
        with on_device(self.pipeline.vae):
            decoded = self.pipeline.decode_with_gradient(latents)
            rewards, by_video = self._of_videos(decoded.detach(), prompts)
            # Scaled to 1, because small gradients would become 0 in a VAE in float16.
            scale = (
                by_video.abs()
                .flatten(1)
                .amax(1)
                .clamp(min=torch.finfo(torch.float32).tiny)
                .view(-1, 1, 1, 1, 1)
            )
            scaled = (by_video / scale).to(decoded.dtype)
            with decoding.measured_convolutions():
                (by_latents,) = torch.autograd.grad(decoded, latents, scaled)
        by_latents = by_latents * scale
        is_finite = rewards.isfinite() & by_latents.isfinite().flatten(1).all(1)
        return LatentRewards(
            torch.where(is_finite, rewards, torch.nan),
            torch.where(is_finite.view(-1, 1, 1, 1, 1), by_latents, 0.0),
        )

    def _of_videos(self, decoded: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Return rewards (videos,) and their gradients by decoded videos (videos, channels, frames,
        height, width).
        """
        decoded = decoded.requires_grad_()
        videos = decoded.transpose(1, 2)  # (videos, frames, channels, height, width)
        with self.scorer.on_device():
            rewards = self.reward_of_levels(to_levels(videos), prompts)
            is_finite = rewards.isfinite()
            if not is_finite.any():
                return rewards.detach(), torch.zeros_like(decoded, dtype=torch.float32)
            (by_video,) = torch.autograd.grad(rewards[is_finite].sum(), decoded)
        return rewards.detach(), by_video.float()

    def reward_of_levels(self, videos: Tensor, prompts: list[str]) -> Tensor:
        """Return the weighted sum of the scores of videos with levels in [0, 255], with gradient.

        Shape: (videos,).

        Shape of the videos: float (videos, frames, channels, height, width).
        """
        total = torch.zeros(len(videos), device=videos.device)
        names = self.scorer.names
        for name, scorer in self.scorer.scorers.items():
            dimensions = contract.declared_dimensions(scorer)
            weights = [
                self.scorer.weights.get(names.of(name, dimension), 0.0) for dimension in dimensions
            ]
            if any(weights):
                scores = contract.score_with_gradient(scorer, videos, prompts, fps=self.fps)
                total = (
                    total
                    + (
                        scores.to(videos.device) @ scores.new_tensor(weights).to(videos.device)
                    ).float()
                )
        return total


def try_gradient(reward_gradient: RewardGradient, data: DataSettings, prompt: str) -> None:
    """Score a video with gradient and, on a GPU, also decode and differentiate one tile of noise,
    so that a lack of memory shows before the first video is sampled.

    Raises ValueError if a scorer returns other shapes or a detached score.
    """
    video, _ = trial_videos(data.sample_n_frames, data.height, data.width)
    levels = video[None].float().to(reward_gradient.pipeline.device).requires_grad_()
    with reward_gradient.scorer.on_device():
        reward_gradient.reward_of_levels(levels, [prompt])
    if levels.is_cuda:
        del levels
        noise = reward_gradient.pipeline.noise_of_tile(
            data.sample_n_frames, data.height, data.width, batch_size=reward_gradient.batch_size
        )
        reward_gradient(noise, [prompt] * len(noise))


class RewardTerm:
    """The reward gradient as a term beside those of an objective on noise levels, in a column of
    its own: the last one (`RolloutBatch.reward_column`).

    Without noise levels (``nft_levels 0``), the KL to the anchor is measured at the reward step, in
    the same forward pass.
    """

    metrics = ("reward_gradient/reward", "reward_gradient/norm", "reward_gradient/missing")

    def __init__(self, objective: LevelObjective, gradient: RewardGradient):
        self.objective = objective
        self.gradient = gradient
        self.config = objective.config
        self.weight = self.config.objective.reward_weight
        # between the rewards of the passes and of the rollouts, () each
        self._differences: list[Tensor] = []

    # Each pass of an update.

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: Any,
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        """Return the terms of the objective or of the reward, weighted so that the mean over all
        columns is the sum of the means over their own columns.
        """
        if column == rollouts.reward_column:
            return self._reward_terms(
                rollouts, reference, rows, column, kl_coefficient=kl_coefficient
            )
        found = self.objective.terms(
            rollouts, reference, rows, column, kl_coefficient=kl_coefficient
        )
        scale = len(rollouts.all_columns) / len(rollouts.columns)
        zeros = torch.zeros_like(found.kl)
        return Terms(
            loss=scale * found.loss,
            kl=scale * found.kl,
            deviation=found.deviation,
            metrics={name: scale * value for name, value in found.metrics.items()}
            | dict.fromkeys(self.metrics, zeros),
        )

    def _reward_terms(
        self,
        rollouts: RolloutBatch,
        reference: Any,
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        sample = rollouts.latents_before_last(rows)
        velocity = self.objective.velocity_at(rollouts, rows, column, sample)
        sigma = filled(rollouts.trained_steps[rows, column].tolist(), sample.device).view(
            -1, 1, 1, 1, 1
        )
        denoised = sample - sigma * velocity
        rewards, gradients = self._rewards(rollouts, rows, denoised.detach())
        self._compare(rollouts, rows, rewards)
        # Linear in x0_hat, with the value and the gradient of the reward.
        reward = rewards.nan_to_num(0.0) + (gradients * (denoised - denoised.detach())).flatten(
            1
        ).sum(1)
        position = torch.zeros_like(rewards)
        velocity_norm = torch.zeros_like(rewards)
        if not rollouts.columns and column in reference:
            anchor = select(reference[column], rows)
            position = mean_square(velocity - anchor)
            velocity_norm = relative_norm(velocity, anchor)
        kl = self.config.objective.kl_weights.position * position
        scale = len(rollouts.all_columns)
        loss = scale * (kl_coefficient * kl - self.weight * reward)
        norm = gradients.flatten(1).norm(dim=1)
        values = {
            "loss/total": loss,
            "kl/position": scale * position,
            "policy/velocity_norm": scale * velocity_norm,
            "reward_gradient/reward": scale * rewards.nan_to_num(0.0),
            "reward_gradient/norm": scale * self.weight * norm,
            "reward_gradient/missing": scale * rewards.isnan().float(),
        }
        zeros = torch.zeros_like(rewards)
        return Terms(
            loss=loss,
            kl=scale * kl,
            deviation=zeros,
            metrics={
                name: values.get(name, zeros) for name in (*self.objective.metrics, *self.metrics)
            },
        )

    def _rewards(self, rollouts: RolloutBatch, rows: list[int], denoised: Tensor) -> LatentRewards:
        if self.config.reward.ignore_rewards:  # a control run: the pass without the reward
            return LatentRewards(denoised.new_zeros(len(rows)), torch.zeros_like(denoised))
        cost = self.objective.cost
        cost.flops += 2 * len(rows) * cost.decode_flops
        return self.gradient(denoised, [rollouts.prompts[row] for row in rows])

    # Checks.

    def _compare(self, rollouts: RolloutBatch, rows: list[int], rewards: Tensor) -> None:
        """Record how much the rewards of a pass differ from those of the rollouts, where both
        decode the same latents.

        The last step of an ODE ends at x0_hat.
        """
        if self.config.reward.ignore_rewards or rollouts.schedule.transitions[-1].is_stochastic:
            return
        for row, reward in zip(rows, rewards):
            if row in rollouts.rewards and not rollouts.rewards[row].is_missing:
                # NaN if the score with gradient or its gradient is not finite
                self._differences.append((reward - rollouts.rewards[row].total).abs())

    def begin(self) -> None:
        """Forget the rewards of the last iteration."""
        self._differences.clear()

    def check_fresh(self, iteration: int) -> None:
        """Raise OffPolicyError, on all ranks together, if the reward with gradient differs from the
        reward of the rollout, in the passes of this iteration so far.
        """
        failed = difference = torch.zeros((), device=self.objective.pipeline.device)
        if self._differences:
            differences = torch.stack(self._differences)
            failed = differences.isnan().float().mean()
            difference = differences.nan_to_num(0.0).amax()
        text = "the difference between the reward with gradient and the reward of the rollout"
        checked = Limited(
            difference,
            EXACT_REWARD if self.config.model.dtype == "fp32" else ROUNDED_REWARD,
            "the policy is still the rollout policy, so score and score_with_gradient of a scorer "
            "return different values, or its random numbers differ",
        )
        unusable = Limited(  # one such video contributes nothing
            failed,
            MAX_MISSING,
            "score returns numbers for these videos, so score_with_gradient of a scorer returns "
            "NaN or inf, or a score without a finite gradient, such as a square root at 0",
        )
        place = f"iteration {iteration}, objective {self.config.objective.name}"
        share = "the share of the rewards that have no finite value with gradient"
        check_limits(place, {share: unusable, text: checked}, self.objective.mesh)
