"""A round of rollouts: which rollout sits where, what it was told, what it became, and how its steps are visited."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyvideo.config.settings import Config
from hyvideo.data.randomness import normal, permutation
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.pipelines.conditions import Conditions
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Trajectories


@dataclass(frozen=True)
class RolloutIndex:
    """Of one rollout in the round, whatever rank holds it."""

    group: int
    member: int  # number within the group


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts that this replica holds. Lists and first dimensions are (rollouts,): by row."""

    places: list[RolloutIndex]
    prompts: list[str]
    conditions: Conditions
    rollout: Trajectories
    visits: Tensor  # (rollouts, trained steps): places in the schedule, in the order of training, on the CPU
    rewards: dict[int, Reward] = field(default_factory=dict)  # by row, those that this rank has scored
    advantages: Tensor = torch.empty(0)  # NaN where the rollout is left out of the loss

    def rows_of_update(self, update: int, num_updates: int, iteration: int) -> list[int]:
        """Scored rollouts that the ``update``-th optimizer update of the round trains on.

        Groups take turns, so that every replica that holds several has work in each update.
        """
        scored = self.advantages.isfinite().tolist()
        return [
            row
            for row, place in enumerate(self.places)
            if scored[row] and (place.group + iteration) % num_updates == update
        ]


def places_of_replica(config: Config, mesh: Mesh, batch: int) -> list[RolloutIndex]:
    """Rollouts of this replica in the ``batch``-th batch of the round. Neighbours in number share a group."""
    size, group_size = config.rollout.batch_size, config.rollout.num_generations
    first = (batch * mesh.num_replicas + mesh.replica) * size
    return [RolloutIndex(*divmod(number, group_size)) for number in range(first, first + size)]


def initial_noise(config: Config, iteration: int, place: RolloutIndex, shape: tuple[int, ...]) -> Tensor:
    """What a rollout starts from; shared by its group with ``use_same_noise``. Shape: ``shape``."""
    member = 0 if config.rollout.use_same_noise else place.member
    return normal(shape, config.data.seed, "initial noise", iteration, place.group, member)


def step_noise(config: Config, iteration: int, place: RolloutIndex, step: int, shape: tuple[int, ...]) -> Tensor:
    """The noise of one denoising step of a rollout. Shape: ``shape``."""
    return normal(shape, config.data.seed, "step noise", iteration, place.group, place.member, step)


def timestep_permutations(
    config: Config, iteration: int, places: list[RolloutIndex], steps: list[int], count: int
) -> Tensor:
    """Which stochastic steps of each rollout are trained, and in which order. Shape: (rollouts, count)."""
    if not config.loss.enable_timestep_permutation:
        return torch.tensor([steps[:count]] * len(places))
    orders = [
        permutation(len(steps), config.data.seed, "visiting order", iteration, place.group, place.member)
        for place in places
    ]
    return torch.tensor([[steps[i] for i in order[:count]] for order in orders])
