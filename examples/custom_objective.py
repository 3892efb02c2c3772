"""A custom objective: advantage-weighted regression of the velocity, for ``--objective``; see
docs/extend.md#add-an-objective.

    python post_train.py --config configs/miniature_nft.yaml --output_dir outputs/awr \
        --objective examples/custom_objective.py:WeightedRegression --temperature 0.5
"""

import torch

from hyvideo.loss.nft import mean_square
from hyvideo.settings.sections import Section, learning
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.rollout_batch import select


class WeightedRegression(LevelObjective):
    """Regression of the velocity on re-noised rollouts, in which good rollouts have larger weights.

    With advantage A the loss is ``exp(A / temperature) |v - target|^2`` plus the KL to the anchor,
    if there is one. Source: Peng et al. 2019, "Advantage-Weighted Regression", arXiv:1910.00177.
    """

    class Settings(Section):
        """Flags and lines of a YAML file that this objective adds."""

        temperature: float = learning(
            1.0, "Advantage that changes the weight of a rollout by a factor of e.", gt=0
        )

    metrics = ("loss/total", "kl/position", "awr/error", "awr/weight")

    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        error = mean_square(velocity - target)
        advantages = select(rollouts.advantages, rows)
        weight = (advantages / self.config.objective.temperature).exp()
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
