"""The rollouts of an iteration on one replica: which they are, what became of them, and which steps are trained."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hyvideo.config.sections import DataSettings, LossSettings, RolloutSettings
from hyvideo.data.randomness import generator, normal, permutation
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.conditions import Conditions
from hyvideo.models.reward_models.rewards import Reward
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, Trajectories
from hyvideo.schedulers.scheduling_flow_match_discrete import SdeStepOutput

_LEVELS = 0.02, 0.999  # where a velocity is learnt: nearer to 0 it is of noise that nobody sees


@dataclass(frozen=True)
class RolloutIndex:
    """Group and member of a rollout, whatever rank holds it."""

    group: int
    member: int  # number within the group

    def number(self, group_size: int) -> int:
        """Number among all rollouts of the iteration, groups one after the other."""
        return self.group * group_size + self.member


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts that this replica holds. Lists and first dimensions are (rollouts,): by row."""

    indices: list[RolloutIndex]
    prompts: list[str]
    conditions: Conditions
    trajectories: Trajectories
    # Places in the schedule in the order of training, or noise levels (nft), on the CPU: (rollouts, trained steps).
    trained_steps: Tensor
    anchor_turns: list[int] = field(default_factory=list)  # places in that order where the anchor is compared with
    rewards: dict[int, Reward] = field(default_factory=dict)  # by row, those that this rank has scored
    advantages: Tensor = torch.empty(0)  # NaN where the rollout is left out of the loss
    # Noise for a finished rollout in the ``turn``-th of its trainings, on the CPU.
    new_noise: Callable[[RolloutIndex, int], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def turns(self) -> range:
        """Places in the order of training."""
        return range(self.trained_steps.shape[1])

    def scored(self, rewards: dict[int, Reward], advantages: Tensor) -> "RolloutBatch":
        """A copy with rewards and advantages."""
        return replace(self, rewards=rewards, advantages=advantages)

    def rows_of_update(self, update: int, num_updates: int, iteration: int) -> list[int]:
        """Scored rows that the ``update``-th update trains on; groups take turns, so that all replicas have work."""
        is_scored = self.advantages.isfinite().tolist()
        return [
            row
            for row, index in enumerate(self.indices)
            if is_scored[row] and (index.group + iteration) % num_updates == update
        ]

    def replay(self, pipeline: GRPOPipeline, rows: list[int], steps: Tensor) -> SdeStepOutput:
        """The transition of each row at its step, of ``steps`` (rows,) on the CPU, under the model as it is now."""
        latents = self.trajectories.latents
        return pipeline.replay(
            select(latents, rows, steps),
            select(latents, rows, steps + 1),
            pipeline.scheduler.timesteps[steps],
            self.conditions.select(rows),
        )


def select(values: Tensor, *indices: list[int] | Tensor) -> Tensor:
    """``values[indices]`` by indices that the host knows: none is copied to a GPU, and nothing waits for one."""
    lists = (index.tolist() if isinstance(index, Tensor) else index for index in indices)
    return torch.stack([values[place] for place in zip(*lists, strict=True)])


def indices_of_replica(settings: RolloutSettings, mesh: Mesh, batch: int) -> list[RolloutIndex]:
    """Rollouts of this replica in the ``batch``-th batch of the iteration. Neighbours in number share a group."""
    size, group_size = settings.batch_size, settings.num_generations
    first = (batch * mesh.num_replicas + mesh.replica) * size
    return [RolloutIndex(*divmod(number, group_size)) for number in range(first, first + size)]


@dataclass(frozen=True)
class RolloutNoise:
    """The noise of a run's rollouts: each draw is a function of what it is for, so any rank draws the same."""

    seed: int
    shape: tuple[int, ...]  # of one rollout's latents
    is_shared: bool = False  # the rollouts of a group share their initial noise

    def initial(self, iteration: int, index: RolloutIndex) -> Tensor:
        """Latents that a rollout starts from. Shape: ``shape``."""
        member = 0 if self.is_shared else index.member
        return normal(self.shape, self.seed, "initial noise", iteration, index.group, member)

    def renewed(self, iteration: int, index: RolloutIndex, turn: int) -> Tensor:
        """Noise that is put on a finished rollout for its ``turn``-th training. Shape: ``shape``."""
        return normal(self.shape, self.seed, "new noise", iteration, index.group, index.member, turn)

    def levels(self, iteration: int, indices: list[RolloutIndex], count: int, shift: float) -> Tensor:
        """Noise levels in (0, 1): a draw from each of ``count`` equal parts, shifted as the schedule is, in a random
        order. Shape: (rollouts, count)."""

        def of(index: RolloutIndex) -> list[float]:
            random = generator(self.seed, "noise levels", iteration, index.group, index.member)
            uniform = (random.permutation(count) + random.random(count)) / count
            return (shift * uniform / (1 + (shift - 1) * uniform)).clip(*_LEVELS).tolist()

        return torch.tensor([of(index) for index in indices])

    def anchor_turns(self, iteration: int, num_turns: int, count: int) -> list[int]:
        """Turns at which all rollouts of an iteration are compared with the anchor: all ranks make as many calls."""
        return sorted(permutation(num_turns, self.seed, "anchor turns", iteration)[:count])

    def of_step(self, iteration: int, index: RolloutIndex, step: int) -> Tensor:
        """Noise of one denoising step of a rollout. Shape: ``shape``."""
        return normal(self.shape, self.seed, "step noise", iteration, index.group, index.member, step)


def timestep_permutations(
    loss: LossSettings, data: DataSettings, iteration: int, indices: list[RolloutIndex], steps: list[int], count: int
) -> Tensor:
    """Stochastic steps of each rollout that are trained, in the order of training. Shape: (rollouts, count)."""
    if not loss.enable_timestep_permutation:
        return torch.tensor([steps[:count]] * len(indices))
    orders = [
        permutation(len(steps), data.seed, "visiting order", iteration, index.group, index.member) for index in indices
    ]
    return torch.tensor([[steps[i] for i in order[:count]] for order in orders])
