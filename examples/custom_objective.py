"""A custom objective: advantage-weighted regression of the velocity, for ``--objective``; see
docs/add_an_objective.md.

    python post_train.py --config configs/miniature_nft.yaml --output_dir outputs/awr \
        --objective examples/custom_objective.py:WeightedRegression
"""

import torch

from hyvideo.grpo.nft import mean_square
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.rollout_batch import select

TEMPERATURE = 1.0  # advantage that changes a rollout's weight by a factor of e


class WeightedRegression(LevelObjective):
    """Regression of the velocity on re-noised rollouts, in which good rollouts have larger weights.

    With advantage A the loss is ``exp(A / TEMPERATURE) |v - target|^2`` plus the KL to the anchor,
    if there is one. Source: Peng et al. 2019, "Advantage-Weighted Regression", arXiv:1910.00177.
    """

    metrics = ("loss/total", "kl/position", "awr/error", "awr/weight")

    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        error = mean_square(velocity - target)
        weight = (select(rollouts.advantages, rows) / TEMPERATURE).exp()
        kl = torch.zeros_like(error)
        if column in reference:  # the anchor's velocities
            kl = self.anchor_weight(rollouts, reference) * mean_square(
                velocity - select(reference[column], rows)
            )
        loss = weight * error + kl_coefficient * self.config.objective.kl_weights.position * kl
        return Terms(
            loss=loss,
            kl=kl,
            deviation=torch.zeros_like(error),  # not measured
            metrics={
                "loss/total": loss,
                "kl/position": kl,
                "awr/error": error,
                "awr/weight": weight,
            },
        )
