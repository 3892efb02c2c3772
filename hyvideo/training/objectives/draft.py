"""Reward gradients (``objective draft``): this file has the KL to the anchor, `reward_gradient` the
reward.

    loss = kl_coefficient |v - v_anchor|^2 at re-noised rollouts - reward_gradient_weight R(decode(x0_hat))

With ``anchor_cfg_scale`` above 1, the KL teaches the policy to sample as the guided base model
does.
"""

import torch

from hyvideo.loss.nft import mean_square, relative_norm
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.rollout_batch import RolloutBatch, select


class Draft(LevelObjective):
    """The KL term of objective draft; see `Objective` for the arguments."""

    metrics = ("loss/total", "kl/position", "policy/velocity_norm")
    uses_advantages = False

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: dict[int, torch.Tensor],
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        velocity, _ = self.velocity_and_target(rollouts, rows, column)
        zeros = velocity.new_zeros(len(rows))
        position = 0.0 * mean_square(velocity)  # of a column without KL
        # without predictions, the anchor equals the policy
        norm = zeros if reference else zeros + 1.0
        if column in reference:
            anchor = select(reference[column], rows)
            weight = self.anchor_weight(rollouts, reference)
            position = weight * mean_square(velocity - anchor)
            norm = weight * relative_norm(velocity, anchor)
        kl = self.config.objective.kl_weights.position * position
        loss = kl_coefficient * kl
        return Terms(
            loss=loss,
            kl=kl,
            deviation=zeros,
            metrics={"loss/total": loss, "kl/position": position, "policy/velocity_norm": norm},
        )
