"""Diffusion-DPO (``objective dpo``): a velocity loss on rated pairs of videos, without rollouts and
reward models.

    velocities of the base model -> errors of winner and loser -> loss of each pair, KL to the base model

Both videos of a pair share noise level and noise. With two or more videos per forward pass, whole
pairs are in one pass. With one, a forward pass without a gradient computes the errors of all videos
in advance, so that only one graph is in memory; the gradient is the same.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyvideo.distributed.collectives import merge_rows
from hyvideo.loss.dpo import DPOInputs, DPOTerms, accuracy_of, dpo_terms, dpo_terms_of_videos
from hyvideo.loss.nft import mean_square
from hyvideo.models.conditions import to_device
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.given_videos import fit_of
from hyvideo.training.objective import HeldOutBatch, LevelObjective, Terms
from hyvideo.training.on_policy_check import Limited, check_limits, step_tolerance
from hyvideo.training.rollout_batch import Pass, RolloutBatch, RolloutIndex, select


@dataclass(frozen=True)
class BaseModel:
    """Velocities and errors that an update compares the policy with, by column.

    Shapes: (videos, ...) and (videos,).
    """

    velocities: dict[int, Tensor]  # of the base model
    errors: dict[int, Tensor]  # of these velocities
    policy_errors: dict[int, Tensor]  # of the policy; empty if a pass has whole pairs


class DPO(LevelObjective):
    """The loss of Diffusion-DPO; see `Objective` for the arguments.

    The base model is the fixed anchor.
    """

    metrics = (
        "loss/policy",
        "loss/total",
        "kl/position",
        "dpo/accuracy",
        "dpo/displacement",
        "dpo/margin",
        "dpo/contrast",
    )
    deviation_names = ("dpo/deviation_max", "dpo/deviation_first")
    uses_advantages = False
    held_out_levels = 4

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        # of the batches of held-out pairs; the base model does not change
        self._base_errors: list[Tensor] = []
        self._has_warned = False  # that the policy still equals the base model

    @property
    def has_whole_pairs(self) -> bool:
        """True if every pass has whole pairs."""
        return self.config.rows_per_pass % 2 == 0

    def draw(
        self, schedule: Schedule, iteration: int, indices: list[RolloutIndex], count: int
    ) -> Tensor:
        """Return the noise levels of each video, equal within a pair. Shape: (videos, count)."""
        return super().draw(
            schedule, iteration, [RolloutIndex(index.group, 0) for index in indices], count
        )

    def noise_of(self, rollouts: RolloutBatch, row: int, column: int) -> Tensor:
        """Return the noise that re-noises a video, equal within a pair.

        Shape: (channels, frames, height, width).
        """
        index = RolloutIndex(rollouts.indices[row].group, 0)
        return self.noise.for_renoising(rollouts.iteration, index, column)

    def prepare(self, rollouts: RolloutBatch) -> BaseModel:
        """Return the velocities of the base model, which are also measured while they equal the
        policy's.

        In the first iteration they show whether the base model and the policy are the same.
        """
        self.cache_levels(rollouts)
        policy_errors = {}
        if not self.has_whole_pairs:
            policy_errors = self._errors(rollouts, self._predictions(rollouts, rollouts.columns))
        with self._as_anchor(self.policy.anchor):
            velocities = self._predictions(rollouts, rollouts.columns)
        return BaseModel(velocities, self._errors(rollouts, velocities), policy_errors)

    def _errors(self, rollouts: RolloutBatch, velocities: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the mean squared errors of velocities by column. Shape of each: (videos,)."""
        rows = list(range(len(rollouts)))
        found = {}
        for column, each in velocities.items():
            found[column] = torch.cat(
                [mean_square(each[[row]] - self.target_of(rollouts, row, column)) for row in rows]
            )
        return found

    def target_of(self, rollouts: RolloutBatch, row: int, column: int) -> Tensor:
        """Return the target velocity of a re-noised video.

        Shape: (1, channels, frames, height, width).
        """
        final = select(rollouts.trajectories.latents, [row], [-1])
        return to_device(self.noise_of(rollouts, row, column)[None], final.device) - final

    def measure(self, batches: Iterable[HeldOutBatch], count: int) -> dict[str, float]:
        """Return how often the policy agrees with the answers to prompts that it does not train on;
        empty if there are none. Collective.

        The policy agrees with an answer if its velocity errors, relative to those of the base model
        and averaged over the noise levels, are smaller for the winner.
        """
        margins: dict[int, list[float]] = {}
        for number, (pairs, videos) in enumerate(batches):
            if number == len(self._base_errors):
                self._base_errors.append(self.errors(videos, of_base_model=True))
            # (videos, levels)
            change = self.errors(videos, of_base_model=False) - self._base_errors[number]
            of_pairs = change.mean(1).view(-1, 2)
            margin = -self.config.objective.dpo_beta / 2 * (of_pairs[:, 0] - of_pairs[:, 1])
            margins |= {pair: [value] for pair, value in zip(pairs, margin.tolist(), strict=True)}
        if not margins:
            return {}
        merged = merge_rows(margins, count, 1, self.mesh)[:, 0]
        return {
            "dpo/held_out_accuracy": accuracy_of(merged).mean().item(),
            "dpo/held_out_margin": merged.mean().item(),
        }

    @torch.no_grad()
    def errors(self, rollouts: RolloutBatch, *, of_base_model: bool) -> Tensor:
        """Return the velocity errors of the policy or the base model, without a gradient.

        Shape: (videos, columns).
        """
        self.cache_levels(rollouts)
        if of_base_model:
            with self._as_anchor(self.policy.anchor):
                velocities = self._predictions(rollouts, rollouts.columns)
        else:
            velocities = self._predictions(rollouts, rollouts.columns)
        found = self._errors(rollouts, velocities)
        return torch.stack([found[column] for column in rollouts.columns], dim=1)

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: BaseModel,
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        inputs = DPOInputs(
            velocity=velocity,
            anchor_velocity=select(reference.velocities[column], rows),
            target=target,
            weights=select(rollouts.weights, rows),
        )
        found = self._dpo_terms(inputs, rollouts, reference, rows, column, kl_coefficient)
        return Terms(
            loss=found.loss,
            kl=found.kl,
            deviation=found.deviation,
            metrics={
                "loss/policy": found.policy,
                "loss/total": found.loss,
                "kl/position": found.kl,
                "dpo/accuracy": found.accuracy,
                "dpo/displacement": found.displacement,
                "dpo/margin": found.margin,
                "dpo/contrast": found.contrast,
            },
        )

    def _dpo_terms(
        self,
        inputs: DPOInputs,
        rollouts: RolloutBatch,
        reference: BaseModel,
        rows: list[int],
        column: int,
        kl_coefficient: float,
    ) -> DPOTerms:
        beta = self.config.objective.dpo_beta
        if self.has_whole_pairs:
            members = [rollouts.indices[row].member for row in rows]
            assert members == [0, 1] * (len(rows) // 2), (
                f"a pass must have whole pairs, got members {members}"
            )
            return dpo_terms(inputs, beta=beta, kl_coefficient=kl_coefficient)
        winners = [row - rollouts.indices[row].member for row in rows]
        losers = [row + 1 for row in winners]
        of_pairs = [
            torch.stack([select(errors[column], winners), select(errors[column], losers)], dim=1)
            for errors in (reference.policy_errors, reference.errors)
        ]
        is_winner = torch.tensor(
            [rollouts.indices[row].member == 0 for row in rows], device=inputs.velocity.device
        )
        return dpo_terms_of_videos(
            inputs, *of_pairs, is_winner, beta=beta, kl_coefficient=kl_coefficient
        )

    def check_moved(self, deviation: float, iteration: int, *, is_fresh: bool) -> None:
        """Warn once if the policy still equals the base model after an update."""
        if deviation > 0 or self._has_warned:
            return
        self._has_warned = True
        if self.mesh.is_main:
            print(
                f"\niteration {iteration}, objective dpo: the policy still equals the base model "
                "after an update, so that winners and losers have no contrast (dpo/contrast 0): "
                "the update was too small to change any velocity; raise learning_rate",
                file=sys.stderr,
                flush=True,
            )

    def check_fresh(
        self,
        rollouts: RolloutBatch,
        reference: BaseModel,
        passes: list[Pass],
        losses: list[Tensor],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise an error, on all ranks, if the loss is not finite, if the policy differs from the
        base model before the first update of the run, or if a trained model fits the videos worse
        than a zero velocity does.
        """
        super().check_fresh(rollouts, reference, passes, losses, deviations, iteration)
        checked = {}
        if self.policy.anchor.equals_policy:
            text = (
                "the relative difference between the errors of the policy and the base model "
                "before any update"
            )
            checked[text] = Limited(
                torch.stack(deviations).amax(), step_tolerance(self.config.model.dtype)
            )
        if len(deviations) == 1 and not self.config.model.random_weights:
            checked |= fit_of(self, rollouts, passes[0].rows[0])
        check_limits(f"iteration {iteration}, objective dpo", checked, self.mesh)
