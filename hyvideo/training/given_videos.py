"""Videos from files in place of rollouts: the batch of an iteration."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hyvideo.data.examples import Example
from hyvideo.data.prompts import PromptOrder, Request
from hyvideo.grpo.nft import mean_square
from hyvideo.models.conditions import to_device
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.training.on_policy_check import Limited
from hyvideo.training.rewards import PendingRewards
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex
from hyvideo.training.rollouts import replica_indices
from hyvideo.training.video_latents import VideoLatents

if TYPE_CHECKING:
    from hyvideo.training.objective import LevelObjective, Objective

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
        objective: "Objective",
        encoder: ConditionEncoder,
        inputs: RunInputs,
        latents: VideoLatents,
    ):
        self.config = objective.config
        self.mesh = objective.mesh
        self.pipeline = objective.pipeline
        self.progress = objective.progress
        self.cost = objective.cost
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

    def collect(
        self, objective: "Objective", iteration: int, *, is_scored: bool = False
    ) -> tuple[RolloutBatch, PendingRewards]:
        """Return the videos of an iteration, without advantages, and no pending rewards."""
        assert not is_scored, "given videos have no rewards"
        self.progress.check()
        order = self.order.indices(iteration)
        indices = replica_indices(self.config.rollout, self.mesh)
        examples = [self.examples.train[order[index.group]] for index in indices]
        with self.progress.timed("pairs", f"{len(indices)} videos"):
            rollouts = self.batch(
                objective,
                iteration,
                indices,
                [example.request for example in examples],
                videos_of(examples, indices),
                self.plan.num_trained_steps,
            )
        self.cost.start()
        return rollouts, PendingRewards()

    def batch(
        self,
        objective: "Objective",
        iteration: int,
        indices: list[RolloutIndex],
        requests: Sequence[Request],  # of each video
        videos: Sequence[Path],
        num_levels: int,
    ) -> RolloutBatch:
        """Return videos as rollouts of which only the final latents are known."""
        conditions = self.encoder(list(requests), self.config.sampling.size)
        latents = torch.stack([self.latents.read(video) for video in videos])
        latents = to_device(latents, self.pipeline.device)
        return RolloutBatch(
            indices=indices,
            prompts=[request.prompt for request in requests],
            conditions=conditions.to(self.pipeline.device),
            trajectories=Trajectories(
                latents=latents[:, None], log_probs=latents.new_zeros(len(latents), 0)
            ),
            schedule=self.schedule,
            trained_steps=objective.draw(self.schedule, iteration, indices, num_levels),
            anchor_columns=list(range(num_levels)),
            iteration=iteration,
            videos=list(map(str, videos)),
        )


def videos_of(examples: Sequence[Example], indices: Sequence[RolloutIndex]) -> list[Path]:
    """Return the video of each member; members beyond the number of videos begin again, with other
    noise.
    """
    return [
        example.videos[index.member % len(example.videos)]
        for example, index in zip(examples, indices, strict=True)
    ]


@torch.no_grad()
def fit_of(objective: "LevelObjective", rollouts: RolloutBatch, row: int) -> dict[str, Limited]:
    """Return the velocity error of a video at its highest noise level over that of a zero velocity,
    by what it is. A trained model is below 1 if the latents are those of its VAE.
    """
    noisiest = int(rollouts.trained_steps[row].argmax())
    velocity, target = objective.velocity_and_target(rollouts, [row], noisiest)
    objective.cost.add(objective.num_forwards(rollouts, [row], noisiest))
    error = mean_square(velocity - target) / mean_square(target)
    return {ZERO_ERROR: Limited(error.squeeze(), 1.0, UNTRAINED)}
