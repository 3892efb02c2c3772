"""The interface of an objective: what it trains on, and the loss terms of a pass.

    draw, prepare -> terms, once per pass -> (`PolicyUpdate`) gradients, optimizer step, KL coefficient

It knows tensors: neither how videos are made (`iteration`) nor the other parts of a run.

The built-in ones are the files in `objectives/`. A custom objective is a class in a file,
``--objective FILE.py:NAME``, that inherits from `StepObjective` or `LevelObjective` and defines
``metrics`` and ``terms`` (docs/extend.md#add-an-objective).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hyvideo.loss.flow_map import DIFFERENCE, derivative_term, differences
from hyvideo.models.conditions import to_device
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, Times
from hyvideo.schedulers.schedule import Schedule, filled
from hyvideo.settings.config import Config
from hyvideo.training.anchor import Anchor
from hyvideo.training.cost import Cost
from hyvideo.training.policy import Policy
from hyvideo.training.progress import Progress
from hyvideo.training.rollout_batch import (
    Pass,
    RolloutBatch,
    RolloutIndex,
    RolloutNoise,
    chunks,
    select,
    timestep_permutations,
)


@dataclass(frozen=True)
class Terms:
    """Loss terms of the rows of a pass; the update divides their sum by the number of terms of all
    passes.
    """

    loss: Tensor  # (rows,), with gradient, KL terms included
    kl: Tensor  # (rows,), what the KL coefficient observes, without the coefficient
    # (rows,), distance between the policy and the rollout policy, 0 before the first update
    deviation: Tensor
    # by name, (rows,) each; the update reports their means over all terms
    metrics: dict[str, Tensor]


class HeldOutBatch(NamedTuple):
    """Given videos that are not trained on, on this replica."""

    groups: list[int]  # numbers of their examples
    videos: RolloutBatch  # of ``groups``, with `Objective.held_out_levels` columns


class Objective(ABC):
    """Base class of the objectives: what an update trains on, and the loss of a pass.

    Attributes:
        trains: Stochastic ``steps`` of the schedule, all steps of an ODE rollout (``path``), or noise ``levels``; set
            by `StepObjective` and `LevelObjective`.
        metrics: Names of `Terms.metrics`, in the order of metrics.jsonl.
        by_step: Those of them that are also reported by denoising step.
        deviation_names: Names of the largest `Terms.deviation` of all updates, and of the first one.
        uses_advantages: Whether an update is skipped whose advantages are all 0, because the loss has nothing to learn
            from them.
        held_out_levels: Noise levels at which a validation measures given videos that are not trained on (`measure`);
            0: it does not.
        keeps_all_latents: Whether rollouts keep their latents at every step; otherwise the noise, those after the first
            step, and the final ones.
    """

    trains: ClassVar[Literal["steps", "path", "levels"]]
    metrics: ClassVar[tuple[str, ...]]
    by_step: ClassVar[tuple[str, ...]] = ()
    deviation_names: ClassVar[tuple[str, str]] = ("policy/max_deviation", "policy/first_deviation")
    uses_advantages: ClassVar[bool] = True
    held_out_levels: ClassVar[int] = 0
    keeps_all_latents: ClassVar[bool] = False

    def __init__(
        self,
        config: Config,
        policy: Policy,
        pipeline: GRPOPipeline,
        progress: Progress,
        cost: Cost,  # counts forward passes and FLOPs
    ):
        self.config = config
        self.mesh = policy.mesh
        self.policy = policy
        self.pipeline = pipeline
        self.progress = progress
        self.cost = cost
        self.noise = RolloutNoise.of_run(config, pipeline)

    @property
    def name(self) -> str:
        """Value of the setting ``objective``."""
        return self.config.objective.name

    # What it trains on.

    def schedule(self, schedule: Schedule, iteration: int) -> Schedule:
        """Return the schedule of the rollouts of an iteration, given that of the settings."""
        return schedule

    @abstractmethod
    def draw(
        self, schedule: Schedule, iteration: int, indices: list[RolloutIndex], count: int
    ) -> Tensor:
        """Return what is trained of each rollout, in the order of training.

        Shape: (rollouts, count), on the CPU.
        """

    @abstractmethod
    def timesteps(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the timesteps of a pass, on the CPU. Shape: (rows,)."""

    @abstractmethod
    def velocity_at(
        self, rollouts: RolloutBatch, rows: list[int], column: int, latents: Tensor
    ) -> Tensor:
        """Return the guided velocity of given latents at what a pass trains.

        Shape: as ``latents``.
        """

    @abstractmethod
    def prediction(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return what the KL to the anchor compares, under the current weights.

        Shape: (rows, channels, ...).
        """

    def weights_by_step(self, schedule: Schedule) -> list[float] | None:
        """Return the factor of the policy term at each denoising step; None if there is none.

        Shape: (steps,).
        """
        return None

    @property
    def needs_means(self) -> bool:
        """True if the next rollouts must store the means of the trained steps
        (`Trajectories.means`).
        """
        return False

    # Before the updates of an iteration.

    def prepare(self, rollouts: RolloutBatch) -> Any:
        """Return what ``terms`` compares the policy with; called once per iteration, before the
        first update.

        Here: the anchor's predictions by column, at the columns that measure the KL to the anchor.
        """
        return self.anchor_predictions(rollouts)

    def anchor_predictions(self, rollouts: RolloutBatch) -> dict[int, Tensor]:
        """Return the anchor's predictions by column; empty without an anchor, and if it equals the
        policy.

        Shape of each: (rollouts, channels, frames, height, width).
        """
        anchor = self.policy.anchor
        if anchor is None or anchor.equals_policy:
            return {}
        with self._as_anchor(anchor):
            return self._predictions(rollouts, rollouts.anchor_columns)

    def anchor_weight(self, rollouts: RolloutBatch, predictions: dict[int, Tensor]) -> float:
        """Return the factor of the KL to the anchor in the columns that measure it, which keeps its
        mean unbiased.
        """
        return len(rollouts.columns) / max(1, len(predictions))

    # Each pass of an update.

    @abstractmethod
    def terms(
        self,
        rollouts: RolloutBatch,
        reference: Any,
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        """Return the loss terms of ``rows`` at what they train in ``column``, from one training
        forward pass.

        ``reference`` is what ``prepare`` returned.
        """

    def empty_pass(self, rollouts: RolloutBatch, column: int) -> Tensor:
        """Return a velocity that makes the calls of a pass; for replicas with fewer rollouts than
        others.
        """
        return self.empty_velocity(rollouts, column)

    def empty_velocity(self, rollouts: RolloutBatch, column: int) -> Tensor:
        """Return a velocity that makes the calls of `velocity_at`.

        The latents are zeros, because rollouts without a reward may contain NaN.
        """
        zeros = torch.zeros_like(rollouts.trajectories.latents[:1, 0])
        return self.velocity_at(rollouts, [0], column, zeros)

    def num_forwards(self, rollouts: RolloutBatch, rows: list[int], column: int) -> int:
        """Return the number of forward passes of the transformer that a pass makes."""
        return self.pipeline.num_forwards(self.timesteps(rollouts, rows, column))

    def measure(self, batches: Iterable[HeldOutBatch], count: int) -> dict[str, float]:
        """Return what a validation measures on given videos that are not trained on, ``count``
        examples on all replicas. Collective.

        Here: nothing.
        """
        return {}

    # Checks, on all ranks together.

    def check_fresh(
        self,
        rollouts: RolloutBatch,
        reference: Any,
        passes: list[Pass],
        losses: list[Tensor],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise an error, on all ranks, if the first passes of an iteration's first update are
        wrong.

        Called after the first and the last pass, with the loss and the largest deviation of each,
        shape (), while the policy is still the rollout policy. Here: nothing.
        """
        return None

    def check_moved(self, deviation: float, iteration: int, *, is_fresh: bool) -> None:
        """Raise an error, on all ranks, or warn, if the largest deviation after an update that
        changed the policy is wrong.

        ``is_fresh``: the policy is the rollout policy, so that only an earlier iteration has
        changed it. Here: any deviation is right.
        """
        return None

    # Forward passes without a gradient.

    @torch.no_grad()
    def predict(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return `prediction` without a gradient, and count its cost."""
        self.cost.add(self.num_forwards(rollouts, rows, column))
        return self.prediction(rollouts, rows, column)

    def _predictions(self, rollouts: RolloutBatch, columns: Sequence[int]) -> dict[int, Tensor]:
        """Return the predictions of all rows at these columns.

        Shape of each: (rollouts, channels, ...).
        """
        found = {
            column: torch.empty_like(rollouts.trajectories.latents[:, 0]) for column in columns
        }
        passes = list(product(chunks(range(len(rollouts)), self.config.rows_per_pass), columns))
        for number, (rows, column) in enumerate(passes, 1):
            self.progress.begin_pass("anchor", f"pass {number}/{len(passes)}")
            found[column][rows[0] : rows[-1] + 1] = self.predict(rollouts, rows, column)
        return found

    @contextmanager
    def _as_anchor(self, anchor: Anchor) -> Iterator[None]:
        """Use the anchor's weights and guidance scale within the context."""
        sampling = self.pipeline.sampling
        with anchor.swapped_in():
            self.pipeline.sampling = replace(sampling, guidance=self.config.anchor_guidance)
            try:
                yield
            finally:
                self.pipeline.sampling = sampling


class StepObjective(Objective):
    """An objective on the sampled transitions: it trains stochastic steps of the schedule, or all
    with ``path``.
    """

    trains = "steps"
    keeps_all_latents = True

    def draw(
        self, schedule: Schedule, iteration: int, indices: list[RolloutIndex], count: int
    ) -> Tensor:
        """Return the trained steps of each rollout. Shape: (rollouts, count)."""
        steps = schedule.stochastic_steps
        if self.config.objective.trains == "path":
            steps = list(range(len(schedule.transitions)))
        return timestep_permutations(
            self.config.objective, self.config.data, iteration, indices, steps, count
        )

    def timesteps(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        return rollouts.schedule.timesteps[rollouts.trained_steps[rows, column]]

    def velocity_at(
        self, rollouts: RolloutBatch, rows: list[int], column: int, latents: Tensor
    ) -> Tensor:
        steps = rollouts.trained_steps[rows, column].tolist()
        return self.pipeline.velocity_at_steps(
            latents, rollouts.schedule, steps, rollouts.conditions.select(rows)
        )

    def prediction(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the means of the sampled transitions."""
        return rollouts.replay(self.pipeline, rows, rollouts.trained_steps[rows, column]).mean


class LevelObjective(Objective):
    """An objective on re-noised rollouts: it trains velocities at drawn noise levels.

    A rollout x0 is re-noised to ``x_s = (1 - s) x0 + s e`` with noise e, so that the target
    velocity is ``e - x0``. No log-probabilities are needed, so the rollouts may come from any
    sampler.
    """

    trains = "levels"

    def draw(
        self, schedule: Schedule, iteration: int, indices: list[RolloutIndex], count: int
    ) -> Tensor:
        """Return the noise levels of each rollout. Shape: (rollouts, count).

        A flow map's interval with a length needs room for the central difference on both sides of
        its level.
        """
        shift = self.config.rollout.shift
        levels = self.noise.levels(iteration, indices, count, shift, self.config.trained_levels)
        if not self.pipeline.transformer.is_flow_map:
            return levels
        ends = torch.stack(
            [
                self.noise.ends(iteration, indices, column, levels[:, column], shift)
                for column in range(count)
            ],
            dim=1,
        )
        return torch.where(ends == levels, levels, levels.clamp(DIFFERENCE, 1 - DIFFERENCE))

    def timesteps(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        return 1000 * rollouts.trained_steps[rows, column]

    def velocity_at(
        self, rollouts: RolloutBatch, rows: list[int], column: int, latents: Tensor
    ) -> Tensor:
        return self._velocity(rollouts, rows, column, latents, rollouts.trained_steps[rows, column])

    def _velocity(
        self,
        rollouts: RolloutBatch,
        rows: list[int],
        column: int,
        latents: Tensor,
        levels: Tensor,
    ) -> Tensor:
        """Return the velocity at noise levels, on the CPU, that may differ from the trained ones.

        Shape: as ``latents``.
        """
        ends = self.interval_ends(rollouts, rows, column)
        return self.pipeline.velocity(
            latents,
            1000 * levels,
            rollouts.conditions.select(rows),
            ends=None if ends is None else 1000 * ends,
        )

    def interval_ends(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor | None:
        """Return the noise levels at which the intervals of a flow map end, on the CPU; None for
        other models. Shape: (rows,).
        """
        if not self.pipeline.transformer.is_flow_map:
            return None
        return self.noise.ends(
            rollouts.iteration,
            [rollouts.indices[row] for row in rows],
            column,
            rollouts.trained_steps[rows, column],
            self.config.rollout.shift,
        )

    def prediction(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the velocities at the re-noised rollouts; in the column of the reward gradient,
        at the latents before the last step.
        """
        if column == rollouts.reward_column:
            latents = rollouts.latents_before_last(rows)
        else:
            latents, _ = self.noised_and_target(rollouts, rows, column)
        return self.velocity_at(rollouts, rows, column, latents)

    def velocity_and_target(
        self, rollouts: RolloutBatch, rows: list[int], column: int
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity at re-noised rollouts and its target; for a flow map, its mean
        velocity and the target of the mean velocity (`derivative_term`).

        Shape of each: (rows, channels, ...).
        """
        noised, target = self.noised_and_target(rollouts, rows, column)
        if self.pipeline.transformer.is_flow_map:
            target = target - self._derivative_term(rollouts, rows, column, noised, target)
            self.cost.add(2 * self.num_forwards(rollouts, rows, column))
        return self.velocity_at(rollouts, rows, column, noised), target

    def _derivative_term(
        self,
        rollouts: RolloutBatch,
        rows: list[int],
        column: int,
        latents: Tensor,
        tangent: Tensor,
    ) -> Tensor:
        """Return `derivative_term` of the current weights, which makes two forward passes."""
        ends = self.interval_ends(rollouts, rows, column)
        assert ends is not None, "only flow maps have intervals"
        return derivative_term(
            partial(self._velocity, rollouts, rows, column),
            latents,
            tangent,
            rollouts.trained_steps[rows, column],
            ends,
        )

    def empty_pass(self, rollouts: RolloutBatch, column: int) -> Tensor:
        if self.pipeline.transformer.is_flow_map:
            zeros = torch.zeros_like(rollouts.trajectories.latents[:1, 0])
            self._derivative_term(rollouts, [0], column, zeros, zeros)
        return self.empty_velocity(rollouts, column)

    def noised_and_target(
        self, rollouts: RolloutBatch, rows: list[int], column: int
    ) -> tuple[Tensor, Tensor]:
        """Return the re-noised rollouts and the target of their velocity.

        Shape of each: (rows, channels, ...).
        """
        final = select(rollouts.trajectories.latents, rows, [-1] * len(rows))
        noise = to_device(
            torch.stack([self.noise_of(rollouts, row, column) for row in rows]), final.device
        )
        levels = rollouts.trained_steps[rows, column]
        level = filled(levels.tolist(), final.device).view(-1, 1, 1, 1, 1)
        noised = (1 - level) * final + level * noise
        return noised, noise - final

    def noise_of(self, rollouts: RolloutBatch, row: int, column: int) -> Tensor:
        """Return the noise that re-noises a rollout, on the CPU.

        Shape: (channels, frames, height, width).
        """
        return self.noise.for_renoising(rollouts.iteration, rollouts.indices[row], column)

    def prepare(self, rollouts: RolloutBatch) -> Any:
        self.cache_levels(rollouts)
        return super().prepare(rollouts)

    def cache_levels(self, rollouts: RolloutBatch) -> None:
        """Compute what depends on the noise levels alone, if the transformer caches it."""
        rows = list(range(len(rollouts)))
        times: Times = []
        for column in rollouts.all_columns:
            levels = rollouts.trained_steps[:, column]
            ends = self.interval_ends(rollouts, rows, column)
            if ends is None:
                times += [(timestep, None) for timestep in (1000 * levels).tolist()]
                continue
            steps = differences(levels, ends)
            for starts in (levels, levels + steps, levels - steps):
                times += zip((1000 * starts).tolist(), (1000 * ends).tolist())
        self.pipeline.prepare(times)
