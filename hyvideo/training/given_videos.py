"""Videos from files in place of rollouts: the batch of an iteration."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from hyvideo.data.examples import Example
from hyvideo.data.prompts import PromptOrder, Request
from hyvideo.loading.video_latents import VideoLatents
from hyvideo.loss.nft import mean_square
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.training.objective import HeldOutBatch, LevelObjective, Objective
from hyvideo.training.on_policy_check import Limited
from hyvideo.training.rewards import PendingRewards
from hyvideo.training.rollout_batch import (
    Prompts,
    RolloutBatch,
    RolloutIndex,
    chunks,
    indices_of_replica,
)

ZERO_ERROR = "the velocity error on re-noised videos, relative to that of a zero velocity,"
UNTRAINED = (
    "the latents are not those of this model's VAE, or the model is not trained (then set "
    "random_weights or gate_interval 0)"
)


class GivenVideos:
    """Reads the videos of an iteration on this replica, which an objective names in its settings
    (`ObjectiveSettings.read_videos`).

    Member m of a group is the m-th video of an example: a rated pair has two.
    """

    def __init__(
        self,
        objective: Objective,
        encoder: ConditionEncoder,
        inputs: RunInputs,
        latents: VideoLatents,
    ):
        self.objective = objective
        self.config = objective.config
        self.mesh = objective.mesh
        self.pipeline = objective.pipeline
        self.progress = objective.progress
        self.encoder = encoder
        self.plan = inputs.plan
        self.examples = inputs.videos
        self.latents = latents
        self.schedule = self.config.sampling.schedule()
        self.order = PromptOrder(len(self.examples.train), self.plan.groups, self.config.data.seed)

    @property
    def requests(self) -> list[Request]:
        """Prompts that are trained on."""
        return self.examples.requests

    def choose(self, iteration: int) -> Prompts:
        """Return the prompts of the videos of an iteration."""
        indices = indices_of_replica(self.config.rollout, self.mesh)
        requests = [example.request for example in self._examples_of(iteration, indices)]
        return Prompts(iteration, indices, requests)

    def _examples_of(self, iteration: int, indices: Sequence[RolloutIndex]) -> list[Example]:
        order = self.order.indices(iteration)
        return [self.examples.train[order[index.group]] for index in indices]

    def encode(self, requests: list[Request]) -> Conditions:
        """Return the conditions of requests, on the device of the pipeline."""
        return self.encoder(requests, self.config.sampling.size).to(self.pipeline.device)

    def collect(
        self, prompts: Prompts, conditions: Conditions
    ) -> tuple[RolloutBatch, PendingRewards]:
        """Return the videos of an iteration, and no pending rewards. Of rated pairs, advantages
        tell winners (1) from losers (-1). Weights are relative to the mean of all examples.
        """
        self.progress.check()
        examples = self._examples_of(prompts.iteration, prompts.indices)
        with self.progress.timed("videos", f"{len(examples)} videos"):
            rollouts = self._batch(prompts, examples, conditions, self.plan.num_trained_steps)
        labels = [0.0] * len(examples)
        if self.config.objective.group_size == 2:
            labels = [1.0 if index.member == 0 else -1.0 for index in prompts.indices]
        mean = fmean(example.weight for example in self.examples.train)
        weights = [example.weight / mean for example in examples]
        device = self.pipeline.device
        return replace(
            rollouts,
            advantages=torch.tensor(labels, device=device),
            weights=to_device(torch.tensor(weights), device),
        ), PendingRewards()

    def _batch(
        self,
        prompts: Prompts,
        examples: Sequence[Example],  # of each video
        conditions: Conditions,
        num_levels: int,
    ) -> RolloutBatch:
        """Return videos as rollouts of which only the final latents are known."""
        iteration, indices, requests = prompts
        videos = _videos_of(examples, indices)
        latents = torch.stack([self.latents.read(video) for video in videos])
        latents = to_device(latents, self.pipeline.device)
        return RolloutBatch(
            indices=indices,
            prompts=[request.prompt for request in requests],
            conditions=conditions,
            trajectories=Trajectories(
                latents=latents[:, None], log_probs=latents.new_zeros(len(latents), 0)
            ),
            schedule=self.schedule,
            trained_steps=self.objective.draw(self.schedule, iteration, indices, num_levels),
            anchor_columns=list(range(num_levels)),
            iteration=iteration,
            videos=list(map(str, videos)),
        )

    def held_out(self) -> Iterator[HeldOutBatch]:
        """Yield this replica's share of the examples that are not trained on, in batches.

        The last example may be repeated, so that all replicas have equally many batches. No
        iteration has their number, 0.
        """
        examples = self.examples.held_out
        group_size = self.config.rollout.num_generations
        rounds = math.ceil(len(examples) / self.mesh.num_replicas)
        numbers = [
            min(self.mesh.replica + turn * self.mesh.num_replicas, len(examples) - 1)
            for turn in range(rounds)
        ]
        for groups in chunks(numbers, max(1, self.config.rollout.batch_size // group_size)):
            self.progress.check()
            indices = [
                RolloutIndex(group, member) for group in groups for member in range(group_size)
            ]
            chosen = [examples[index.group] for index in indices]
            prompts = Prompts(0, indices, [example.request for example in chosen])
            conditions = self.encode(prompts.requests)
            videos = self._batch(prompts, chosen, conditions, self.objective.held_out_levels)
            yield HeldOutBatch(groups, videos)


def _videos_of(examples: Sequence[Example], indices: Sequence[RolloutIndex]) -> list[Path]:
    """Return the video of each member; members beyond the number of videos begin again, with other
    noise.
    """
    return [
        example.videos[index.member % len(example.videos)]
        for example, index in zip(examples, indices, strict=True)
    ]


@torch.no_grad()
def fit_of(objective: LevelObjective, rollouts: RolloutBatch, row: int) -> dict[str, Limited]:
    """Return the velocity error of a video at its highest noise level over that of a zero velocity,
    by what it is. A trained model is below 1 if the latents are those of its VAE.
    """
    noisiest = int(rollouts.trained_steps[row].argmax())
    velocity, target = objective.velocity_and_target(rollouts, [row], noisiest)
    objective.cost.add(objective.num_forwards(rollouts, [row], noisiest))
    error = mean_square(velocity - target) / mean_square(target)
    sigma = rollouts.trained_steps[row, noisiest].item()
    advice = f"measured at sigma {sigma:.3g}; {UNTRAINED}"
    return {ZERO_ERROR: Limited(error.squeeze(), 1.0, advice)}
