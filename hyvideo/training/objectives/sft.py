"""Supervised fine-tuning (``objective sft``): the flow-matching loss on given videos, without
rollouts and reward models.

    velocity of each re-noised video -> its squared error, perhaps a KL to the base model
"""

from typing import Any

import torch
from torch import Tensor

from hyvideo.loss.nft import mean_square
from hyvideo.training.given_videos import fit_of
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.on_policy_check import check_limits
from hyvideo.training.rollout_batch import Pass, RolloutBatch, select


class SFT(LevelObjective):
    """The flow-matching loss ``|v(x_s, s) - (e - x0)|^2`` of given videos x0; see `Objective` for
    the arguments.
    """

    metrics = ("loss/policy", "loss/total", "kl/position")
    uses_advantages = False

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: dict[int, Tensor],
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        error = mean_square(velocity - target)
        kl = torch.zeros_like(error)
        if column in reference:
            kl = mean_square(velocity - select(reference[column], rows))
        loss = error + kl_coefficient * kl
        return Terms(
            loss=loss,
            kl=kl.detach(),
            deviation=torch.zeros_like(error),  # there is no rollout policy to deviate from
            metrics={"loss/policy": error, "loss/total": loss, "kl/position": kl},
        )

    def check_fresh(
        self,
        rollouts: RolloutBatch,
        reference: Any,
        passes: list[Pass],
        losses: list[Tensor],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise an error, on all ranks, if the loss is not finite, or if a trained model fits the
        videos worse than a zero velocity does.
        """
        super().check_fresh(rollouts, reference, passes, losses, deviations, iteration)
        if len(deviations) == 1 and not self.config.model.random_weights:
            fit = fit_of(self, rollouts, passes[0].rows[0])
            check_limits(f"iteration {iteration}, objective sft", fit, self.mesh)
