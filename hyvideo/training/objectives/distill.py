"""Step distillation (``objective distill``): a student of few steps without guidance follows a
guided teacher.

    ODE rollout of the student -> teacher from the student's latents, several substeps per step -> squared error

The student samples N steps at levels L_0 = 1 > ... > L_N = 0. From each of its latents x_i, the
teacher, which is the anchor with ``anchor_cfg_scale``, goes to L_{i+1} in ``anchor_substeps`` Euler
steps and arrives at y. The target of the student's velocity at (x_i, L_i) is the mean velocity of
the teacher, (y - x_i) / (L_{i+1} - L_i). No video is scored.
"""

from itertools import product

import torch
from torch import Tensor

from hyvideo.loss.nft import mean_square
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import divided_levels
from hyvideo.training.objective import StepObjective, Terms
from hyvideo.training.on_policy_check import Limited, check_limits, step_tolerance
from hyvideo.training.rollout_batch import Pass, RolloutBatch, select


class Distill(StepObjective):
    """The loss of step distillation; see `Objective` for the arguments."""

    trains = "path"
    metrics = ("loss/total", "distill/error")
    deviation_names = ("distill/deviation_max", "distill/deviation_first")
    uses_advantages = False

    @property
    def num_substeps(self) -> int:
        """Steps that the teacher takes for each step of a rollout."""
        return self.config.objective.anchor_substeps

    @property
    def draws_levels(self) -> bool:
        """True for a flow map, which learns steps of any length, unless ``sigmas`` gives them."""
        return self.pipeline.transformer.is_flow_map and not self.config.rollout.sigmas

    def schedule(self, schedule: Schedule, iteration: int) -> Schedule:
        """Return the schedule of the student in an iteration."""
        if not self.draws_levels:
            return schedule
        rollout = self.config.rollout
        return Schedule.at(
            self.noise.schedule_levels(iteration, rollout.grpo_sampling_steps, rollout.shift)
        )

    def teacher_schedule(self, rollouts: RolloutBatch) -> Schedule:
        """Return the schedule of the teacher, which divides each step of the rollouts."""
        rollout = self.config.rollout
        if not self.draws_levels:
            return Schedule.at(self.config.sampling.divided(self.num_substeps))
        return Schedule.at(
            divided_levels(rollouts.schedule.sigmas, rollout.shift, self.num_substeps)
        )

    def prepare(self, rollouts: RolloutBatch) -> dict[int, Tensor]:
        """Return the teacher's mean velocities at all steps, by column.

        Shape of each: (rollouts, channels, ...).
        """
        assert self.policy.anchor is not None, "the rules require a fixed anchor"
        with self._as_anchor(self.policy.anchor):
            self.pipeline.prepare_schedule(self.teacher_schedule(rollouts))
            targets = self._predictions(rollouts, rollouts.columns)
        self.pipeline.prepare_schedule(rollouts.schedule)
        return targets

    @torch.no_grad()
    def predict(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the teacher's mean velocity over the step of each row, and count its cost."""
        starts = [
            step * self.num_substeps for step in rollouts.trained_steps[rows, column].tolist()
        ]
        schedule = self.teacher_schedule(rollouts)
        timesteps = schedule.timesteps
        for start, substep in product(starts, range(self.num_substeps)):
            self.cost.add(
                self.pipeline.num_forwards(timesteps[start + substep : start + substep + 1])
            )
        return self.pipeline.mean_velocity(
            self.latents_at(rollouts, rows, column),
            schedule,
            starts,
            self.num_substeps,
            rollouts.conditions.select(rows),
        )

    def prediction(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the velocities of the current weights at the latents of the rollouts."""
        return self.velocity_at(rollouts, rows, column, self.latents_at(rollouts, rows, column))

    def latents_at(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the latents at which the trained steps begin. Shape: (rows, channels, ...)."""
        return select(rollouts.trajectories.latents, rows, rollouts.trained_steps[rows, column])

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: dict[int, Tensor],
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        velocity = self.prediction(rollouts, rows, column)
        target = select(reference[column], rows)
        loss = mean_square(velocity - target)
        return Terms(
            loss=loss,
            kl=torch.zeros_like(loss),
            deviation=self._deviation(rollouts, rows, column, velocity.detach()),
            metrics={"loss/total": loss, "distill/error": (loss / mean_square(target)).sqrt()},
        )

    def _deviation(
        self, rollouts: RolloutBatch, rows: list[int], column: int, velocity: Tensor
    ) -> Tensor:
        """Return the distance between each sampled step and the step with this velocity, in units
        of the step.
        """
        steps = rollouts.trained_steps[rows, column]
        before = self.latents_at(rollouts, rows, column)
        after = select(rollouts.trajectories.latents, rows, steps + 1)
        mean = rollouts.schedule.means(velocity, before, steps.tolist())
        return (mean_square(mean - after) / mean_square(after - before)).sqrt()

    def check_fresh(
        self,
        rollouts: RolloutBatch,
        reference: dict[int, Tensor],
        passes: list[Pass],
        losses: list[Tensor],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise OffPolicyError, on all ranks, if the student differs from its rollouts, or a loss
        is not finite.

        Before the first update of a run the teacher has the weights of the student. With the
        student's guidance and one step, its target must then be exactly the student's velocity.
        """
        super().check_fresh(rollouts, reference, passes, losses, deviations, iteration)
        text = "the distance between a step of a rollout and the same step in the update"
        checked = Limited(
            torch.stack(deviations).amax(),
            step_tolerance(self.config.model.dtype),
            "rollout and update compute different velocities",
        )
        check_limits(f"iteration {iteration}, objective distill", {text: checked}, self.mesh)
        anchor = self.policy.anchor
        if len(deviations) == 1 and anchor is not None and anchor.age == 0 and not anchor.is_given:
            self._check_teacher(rollouts, passes[0], iteration)

    def _check_teacher(self, rollouts: RolloutBatch, a_pass: Pass, iteration: int) -> None:
        """Raise OffPolicyError, on all ranks, if the teacher is not the student although it has the
        same weights.
        """
        rows = a_pass.rows or [0]
        latents = self.latents_at(rollouts, rows, a_pass.column)
        steps = rollouts.trained_steps[rows, a_pass.column].tolist()
        conditions = rollouts.conditions.select(rows)
        with torch.no_grad():
            own = self.velocity_at(rollouts, rows, a_pass.column, latents)
            with self.policy.anchor.swapped_in():
                of_teacher = self.pipeline.mean_velocity(
                    latents, rollouts.schedule, steps, 1, conditions
                )
        self.cost.add(2 * self.num_forwards(rollouts, rows, a_pass.column))
        difference = (own - of_teacher).abs().amax()
        if not a_pass.rows:  # its rollouts may contain NaN
            difference = torch.zeros_like(difference)
        text = (
            "the difference between teacher and student before the first update, with the same "
            "weights, guidance and steps,"
        )
        advice = "the anchor's weights or the steps of the teacher are wrong"
        checked = {text: Limited(difference, 0.0, advice)}
        check_limits(f"iteration {iteration}, objective distill", checked, self.mesh)
