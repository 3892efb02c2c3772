"""Rollouts of an iteration on one replica: their indices, noise, data and trained steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hyvideo.data.prompts import Request
from hyvideo.data.randomness import generator, normal, permutation
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.conditions import Conditions
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, Trajectories
from hyvideo.rewards.rewards import Reward
from hyvideo.schedulers.schedule import Schedule, Step
from hyvideo.settings.config import Config
from hyvideo.settings.objectives import ObjectiveSettings
from hyvideo.settings.sections import DataSettings, RolloutSettings

T = TypeVar("T")

_LEVELS = 0.02, 0.999  # range of trained noise levels; below it the noise is invisible


@dataclass(frozen=True)
class RolloutIndex:
    """Group and member of a rollout within an iteration, independent of the layout."""

    group: int  # index of the prompt within the iteration
    member: int  # index within the group

    def number(self, group_size: int) -> int:
        """Return the index among all rollouts of the iteration, ordered by group."""
        return self.group * group_size + self.member


class Prompts(NamedTuple):
    """What an iteration begins with on this replica: the prompt of each rollout."""

    iteration: int
    indices: list[RolloutIndex]  # of the rollouts
    requests: list[Request]  # prompt and first frame of each


class Pass(NamedTuple):
    """One training forward and backward pass over some rollouts, each at one of its trained steps
    or noise levels.
    """

    rows: list[int]  # of `RolloutBatch`; empty if this replica has fewer rollouts than others
    column: int  # of `RolloutBatch.trained_steps`


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts of this replica, one row each: ``rollouts`` is the first dimension of lists and
    tensors.
    """

    indices: list[RolloutIndex]  # group and member of each rollout
    prompts: list[str]  # equal within a group
    conditions: Conditions  # encoded prompts
    trajectories: Trajectories  # latents and log-probabilities
    schedule: Schedule  # with which they were sampled
    # (rollouts, columns), steps or noise levels as the objective draws them; on the CPU
    trained_steps: Tensor
    has_reward_column: bool = False  # the last column is that of the reward gradient
    anchor_columns: list[int] = field(default_factory=list)  # columns whose position KL is measured
    iteration: int = 0  # counted from 1
    # by row, for the rows that this rank scored
    rewards: dict[int, Reward] = field(default_factory=dict)
    advantages: Tensor = torch.empty(0)  # (rollouts,), NaN for rollouts that the loss excludes
    weights: Tensor = torch.empty(0)  # (rollouts,), of rated pairs in the loss; empty for rollouts
    videos: list[str] = field(default_factory=list)  # file of each given video; empty for rollouts

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def all_columns(self) -> range:
        """Columns of ``trained_steps``."""
        return range(self.trained_steps.shape[1])

    @property
    def columns(self) -> range:
        """Columns that the objective trains: all but that of the reward gradient."""
        return self.all_columns[:-1] if self.has_reward_column else self.all_columns

    @property
    def reward_column(self) -> int | None:
        """Column of the reward gradient, at the last step of the rollouts."""
        return self.all_columns[-1] if self.has_reward_column else None

    def latents_before_last(self, rows: list[int]) -> Tensor:
        """Return the latents before the last step.

        Shape: (rows, channels, frames, height, width).
        """
        last = len(self.schedule.transitions) - 1
        return select(self.trajectories.latents, rows, [last] * len(rows))

    @property
    def versions(self) -> dict[str, int]:
        """Return how often each tensor was changed in place, by name."""
        tensors = {
            "trajectories.latents": self.trajectories.latents,
            "trajectories.log_probs": self.trajectories.log_probs,
            "trajectories.means": self.trajectories.means,
            "trained_steps": self.trained_steps,
            "advantages": self.advantages,
            "weights": self.weights,
        }
        return {name: tensor._version for name, tensor in tensors.items() if tensor is not None}

    def with_rewards(self, rewards: dict[int, Reward], advantages: Tensor) -> "RolloutBatch":
        return replace(self, rewards=rewards, advantages=advantages)

    def updates_of_rows(self, num_updates: int) -> list[int]:
        """Return the update of each row.

        Updates alternate over groups, so that all replicas have work.
        """
        return [(index.group + self.iteration) % num_updates for index in self.indices]

    def rows_of_update(self, update: int, num_updates: int) -> list[int]:
        """Return the scored rows of an update."""
        is_scored = self.advantages.isfinite().tolist()
        return [
            row
            for row, of in enumerate(self.updates_of_rows(num_updates))
            if is_scored[row] and of == update
        ]

    def replay(self, pipeline: GRPOPipeline, rows: list[int], steps: Tensor) -> Step:
        """Recompute each row's transition at its step under the current weights.

        ``steps``: (rows,), on the CPU.
        """
        latents = self.trajectories.latents
        return pipeline.replay(
            select(latents, rows, steps),
            select(latents, rows, steps + 1),
            self.schedule,
            steps.tolist(),
            self.conditions.select(rows),
        )


@contextmanager
def forbid_changes(rollouts: RolloutBatch, objective: str) -> Iterator[None]:
    """Raise ValueError if the body, a method of the objective of this name, changes the rollouts in
    place, which later passes and updates also read.
    """
    before = rollouts.versions
    yield
    changed = [name for name, version in rollouts.versions.items() if version != before[name]]
    if changed:
        raise ValueError(
            f"objective {objective} must not change the rollouts, which other passes also read, got "
            f"rollouts.{changed[0]} changed in place; change a copy instead "
            f"(rollouts.{changed[0]}.clone())"
        )


def select(values: Tensor, *indices: list[int] | Tensor) -> Tensor:
    """Return ``values[indices]`` for indices on the CPU, without copying them to a GPU or
    synchronizing with it.
    """
    lists = (each.tolist() if isinstance(each, Tensor) else each for each in indices)
    return torch.stack([values[index] for index in zip(*lists, strict=True)])


def chunks(values: Sequence[T], size: int) -> list[list[T]]:
    """Split values into consecutive lists of ``size``; the last may be shorter."""
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def indices_of_replica(settings: RolloutSettings, mesh: Mesh) -> list[RolloutIndex]:
    """Return the indices of this replica's rollouts in an iteration, batch by batch.

    Consecutive rollouts share a group.
    """
    size, group_size = settings.batch_size, settings.num_generations
    indices = []
    for batch in range(settings.gradient_accumulation_steps):
        first = (batch * mesh.num_replicas + mesh.replica) * size
        indices += [
            RolloutIndex(*divmod(number, group_size)) for number in range(first, first + size)
        ]
    return indices


Uniform = TypeVar("Uniform", float, np.ndarray)


def _shifted(uniform: Uniform, shift: float) -> Uniform:
    """Return the noise levels whose values before the shift of the schedule are ``uniform``."""
    return shift * uniform / (1 + (shift - 1) * uniform)


def _unshifted(level: float, shift: float) -> float:
    """Return the value before the shift of the schedule of a noise level."""
    return level / (level + shift * (1 - level))


@dataclass(frozen=True)
class RolloutNoise:
    """Random draws for rollouts.

    Each depends only on the seed and its arguments, so every rank can reproduce it.
    """

    seed: int
    shape: tuple[int, ...]  # latents of one rollout
    is_shared: bool = False  # whether the rollouts of a group share their initial noise

    @classmethod
    def of_run(cls, config: Config, pipeline: GRPOPipeline) -> "RolloutNoise":
        """Return the draws of a run with these settings."""
        shape = pipeline.latent_shape(*config.sampling.size)
        return cls(config.data.seed, shape, config.rollout.use_same_noise)

    def initial(self, iteration: int, index: RolloutIndex) -> Tensor:
        """Return the initial latents of a rollout. Shape: ``shape``."""
        member = 0 if self.is_shared else index.member
        return normal(self.shape, self.seed, "initial noise", iteration, index.group, member)

    def for_renoising(self, iteration: int, index: RolloutIndex, column: int) -> Tensor:
        """Return the noise that re-noises a rollout to its noise level in ``column``.

        Shape: ``shape``.
        """
        return normal(
            self.shape, self.seed, "new noise", iteration, index.group, index.member, column
        )

    def levels(
        self,
        iteration: int,
        indices: list[RolloutIndex],
        count: int,
        shift: float,
        interval: tuple[float, float] = (0.0, 1.0),
    ) -> Tensor:
        """Return noise levels in ``interval``: one from each of ``count`` parts of it that are
        equal before the shift of the schedule, in random order. Shape: (rollouts, count).
        """
        low, high = (_unshifted(level, shift) for level in interval)
        lowest, highest = max(interval[0], _LEVELS[0]), min(interval[1], _LEVELS[1])

        def draw(index: RolloutIndex) -> list[float]:
            random = generator(self.seed, "noise levels", iteration, index.group, index.member)
            uniform = (random.permutation(count) + random.random(count)) / count
            levels = _shifted(low + (high - low) * uniform, shift)
            return levels.clip(lowest, highest).tolist()

        return torch.tensor([draw(index) for index in indices])

    def schedule_levels(self, iteration: int, num_steps: int, shift: float) -> tuple[float, ...]:
        """Return the levels of a schedule whose levels between 1 and 0 are drawn: one from the
        middle nine tenths of each of ``num_steps - 1`` equal intervals, shifted. The margins keep
        steps from being so short that rounding decides their velocity. Shape: (num_steps + 1,).
        """
        random = generator(self.seed, "levels of the schedule", iteration)
        count = num_steps - 1
        drawn = [
            (number + 0.05 + 0.9 * random.random()) / count for number in reversed(range(count))
        ]
        return (1.0, *(_shifted(u, shift) for u in drawn), 0.0)

    def ends(
        self,
        iteration: int,
        indices: list[RolloutIndex],
        column: int,
        levels: Tensor,
        shift: float,
    ) -> Tensor:
        """Return the noise levels at which the intervals of a flow map end that begin at ``levels``
        in ``column``.

        Half of the intervals have no length, a quarter end at 0, and the others end at a level
        below the first that is uniform before the shift. Shape: (rollouts,).
        """
        ends = []
        for index, level in zip(indices, levels.tolist(), strict=True):
            random = generator(
                self.seed, "interval ends", iteration, index.group, index.member, column
            )
            kind, share = random.random(2)
            if kind < 0.5:
                ends.append(level)
            elif kind < 0.75:
                ends.append(0.0)
            else:
                uniform = share * _unshifted(level, shift)
                ends.append(_shifted(uniform, shift))
        return torch.tensor(ends)

    def anchor_columns(self, iteration: int, num_columns: int, count: int) -> list[int]:
        """Return the columns whose position KL an iteration measures; the same for all rollouts and
        ranks.
        """
        return sorted(permutation(num_columns, self.seed, "anchor turns", iteration)[:count])

    def for_step(self, iteration: int, index: RolloutIndex, step: int) -> Tensor:
        """Return the noise of one denoising step of a rollout. Shape: ``shape``."""
        return normal(
            self.shape, self.seed, "step noise", iteration, index.group, index.member, step
        )


def timestep_permutations(
    loss: ObjectiveSettings,
    data: DataSettings,
    iteration: int,
    indices: list[RolloutIndex],
    steps: list[int],
    count: int,
) -> Tensor:
    """Return the trained steps of each rollout, in the order of training.

    Shape: (rollouts, count).
    """
    if not loss.enable_timestep_permutation:
        return torch.tensor([steps[:count]] * len(indices))
    orders = [
        permutation(len(steps), data.seed, "visiting order", iteration, index.group, index.member)
        for index in indices
    ]
    return torch.tensor([[steps[i] for i in order[:count]] for order in orders])
