"""GRPO (``objective grpo``): clipped likelihood ratios of the sampled transitions, with KL terms.

anchor means -> log-probability and mean of each trained step -> clipped loss, position KL, velocity
KL
"""

from typing import Any

from torch import Tensor

from hyvideo.loss.grpo import LossInputs, grpo_terms
from hyvideo.schedulers.schedule import Schedule, filled
from hyvideo.training.objective import StepObjective, Terms
from hyvideo.training.on_policy_check import OnPolicyCheck
from hyvideo.training.rollout_batch import Pass, RolloutBatch, select


class GRPO(StepObjective):
    """The loss of SAGE-GRPO; see `Objective` for the arguments."""

    metrics = (
        "loss/policy",
        "loss/total",
        "kl/position",
        "kl/velocity",
        "policy/ratio_mean",
        "policy/clip_fraction",
        "policy/log_prob",
    )
    by_step = ("policy/ratio_mean",)
    deviation_names = ("policy/ratio_max_deviation", "policy/ratio_first_deviation")

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        config = self.config
        self._is_gaussian = (
            config.objective.measures_velocity and config.objective.kl_velocity == "gaussian"
        )
        self.on_policy_check = OnPolicyCheck(
            self.mesh,
            self.pipeline,
            config.objective,
            dtype=config.model.dtype,
            batch_size=config.rollout.batch_size,
        )

    def step_weights(self, schedule: Schedule) -> Tensor:
        """Return the weight of the policy term at each step, 0 at deterministic ones.

        Shape: (steps,), on the CPU.
        """
        if self.config.objective.use_grad_balancing:
            return schedule.equalizer_weights
        return (schedule.equalizer_weights > 0).float()

    def weights_by_step(self, schedule: Schedule) -> list[float]:
        return self.step_weights(schedule).tolist()

    @property
    def needs_means(self) -> bool:
        """True if the closed form of the velocity KL needs the means, or the position KL to an
        equal anchor.
        """
        anchor = self.policy.anchor
        return self._is_gaussian or (anchor is not None and anchor.equals_policy)

    def prepare(self, rollouts: RolloutBatch) -> dict[int, Tensor]:
        """Return the anchor's means at the drawn trained transitions, by column; empty without an
        anchor.

        An anchor that equals the rollout policy has the rollouts' means at all trained steps,
        without a forward pass.
        """
        anchor = self.policy.anchor
        if anchor is not None and anchor.equals_policy:
            return {column: rollouts.trajectories.means[:, column] for column in rollouts.columns}
        return self.anchor_predictions(rollouts)

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: dict[int, Tensor],
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        steps = rollouts.trained_steps[rows, column]
        step = rollouts.replay(self.pipeline, rows, steps)
        device = self.pipeline.device
        position_weights = filled(rollouts.schedule.position_kl_weights[steps].tolist(), device)
        inputs = LossInputs(
            log_prob=step.log_prob,
            mean=step.mean,
            kl_std=rollouts.schedule.kl_std(step.mean, steps),
            old_log_prob=select(rollouts.trajectories.log_probs, rows, steps),
            advantages=select(rollouts.advantages, rows),
            step_weights=filled(self.step_weights(rollouts.schedule)[steps].tolist(), device),
            anchor_mean=select(reference[column], rows) if column in reference else None,
            anchor_weight=self.anchor_weight(rollouts, reference) * position_weights,
            rollout_mean=select(rollouts.trajectories.means[:, column], rows)
            if self._is_gaussian
            else None,
        )
        found = grpo_terms(
            inputs,
            clip_range=self.config.objective.clip_range,
            kl_weights=self.config.objective.kl_weights,
            kl_coefficient=kl_coefficient,
        )
        return Terms(
            loss=found.loss,
            kl=found.kl,
            deviation=(found.ratio - 1).abs(),
            metrics={
                "loss/policy": found.policy,
                "loss/total": found.loss,
                "kl/position": found.position,
                "kl/velocity": found.velocity,
                "policy/ratio_mean": found.ratio,
                "policy/clip_fraction": found.is_clipped,
                "policy/log_prob": found.log_prob,
            },
        )

    def check_fresh(
        self,
        rollouts: RolloutBatch,
        reference: dict[int, Tensor],
        passes: list[Pass],
        losses: list[Tensor],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise OffPolicyError, on all ranks together, if a ratio differs from 1 by more than
        rounding.
        """
        self.on_policy_check(rollouts, passes, deviations, iteration)
