"""The update of DiffusionNFT in place of the clipped loss: finished rollouts with new noise, at drawn levels.

    old velocities, if a round has several updates -> anchor's -> loss, gradients and step as in `PolicyUpdate`

Rollouts may come from any sampler; no log-probability is read. Where a round has one update, the policy still is that
of the rollouts: its own velocity is the old one, and no forward is made for it.
"""

import torch
from torch import Tensor

from hyvideo.distributed.collectives import gather_ranks
from hyvideo.grpo.loss import LossTerms
from hyvideo.grpo.nft import NFTInputs, mean_square, nft_terms
from hyvideo.pipelines.conditions import to_device
from hyvideo.schedulers.scheduling_flow_match_discrete import filled
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.policy_update import Pass, PolicyUpdate
from hyvideo.training.rollout_batch import RolloutBatch, select

# Bounds of what rounding does to a step, relative to it: in the order of additions alone, and in bf16 in other shapes.
EXACT_STEP, ROUNDED_STEP = 1e-4, 5e-2


class NFTUpdate(PolicyUpdate):
    """Trains the policy on finished rollouts; arguments as of `PolicyUpdate`."""

    old_velocities: Tensor | None = None  # of all pairs of the round; None where it has one update

    def reads_means(self) -> bool:
        return False

    def anchor_means(self, rollouts: RolloutBatch) -> Tensor | None:
        """The anchor's velocities, as `PolicyUpdate.anchor_means`, and the old policy's for the updates to come."""
        self.old_velocities = self._means(rollouts, rollouts.turns) if self.num_updates > 1 else None
        if self.policy.anchor and self.policy.anchor.equals_policy:
            return self.old_velocities
        return super().anchor_means(rollouts)

    def terms(
        self, rollouts: RolloutBatch, rows: list[int], turn: int, anchor_mean: Tensor | None, anchor_weight: float = 1.0
    ) -> LossTerms:
        """Terms of the loss of one training forward: each row at the ``turn``-th of its levels."""
        velocity, target = self._velocity(rollouts, rows, turn)
        old = velocity.detach() if self.old_velocities is None else select(self.old_velocities[:, turn], rows)
        inputs = NFTInputs(velocity, old, target, select(rollouts.advantages, rows), anchor_mean, anchor_weight)
        return nft_terms(
            inputs,
            advantage_clip=self.config.reward.advantage_clip,
            kl_weights=self.kl_weights,
            kl_coefficient=self.kl_coefficient.value,
        )

    def _check_fresh(
        self, rollouts: RolloutBatch, passes: list[Pass], deviations: list[Tensor], iteration: int
    ) -> None:
        """Raises OffPolicyError, on all ranks alike, where the policy is not that of the rollouts, where it differs
        from the old one, or where its velocities say less of a rollout's noise than zeros do."""
        row = next((a_pass.rows[0] for a_pass in passes if a_pass.rows), 0)
        noisiest = int(rollouts.trained_steps[row].argmax())  # where a velocity of another level is far off
        with torch.no_grad():
            velocity, target = self._velocity(rollouts, [row], noisiest)
            found = {
                "a first step of the rollouts is off by": self._off_rollout(rollouts, row),
                "the policy is off the old one, before any update, by": torch.stack(deviations).amax(),
                "the error at noised rollouts is, in units of that of zeros,": (
                    mean_square(velocity - target) / mean_square(target)
                ),
            }
        largest = (
            gather_ranks(torch.stack([value.flatten()[0] for value in found.values()]), self.mesh).amax(0).tolist()
        )
        for words, value, bound in zip(found, largest, (self._tolerance, self._tolerance, 1.0)):
            if not value <= bound:
                raise OffPolicyError(f"iteration {iteration}, objective nft: {words} {value:.3g}, above {bound:g}")

    @property
    def _tolerance(self) -> float:
        """Bound of differences that rounding alone makes."""
        return EXACT_STEP if self.config.model.dtype == "fp32" or not self.config.is_batched else ROUNDED_STEP

    def _off_rollout(self, rollouts: RolloutBatch, row: int) -> Tensor:
        """Distance of a rollout's first step from what the policy makes of it now, in units of the step. Shape: ()."""
        before, after = (select(rollouts.trajectories.latents, [row], [place]) for place in (0, 1))
        timestep = self.pipeline.scheduler.timesteps[:1]
        step = self.pipeline.replay(before, after, timestep, rollouts.conditions.select([row]))
        if self.pipeline.sampling.eta > 0:
            return (step.log_prob - rollouts.trajectories.log_probs[row, :1]).abs().squeeze()
        return (mean_square(step.prev_sample_mean - after) / mean_square(after - before)).sqrt().squeeze()

    @torch.no_grad()
    def _mean(self, rollouts: RolloutBatch, a_pass: Pass) -> Tensor:
        self.cost.forwards += self.config.num_branches * len(a_pass.rows)
        return self._velocity(rollouts, *a_pass)[0]

    def _velocity(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> tuple[Tensor, Tensor]:
        """The velocity at rollouts with new noise, and its target. Shape of each: (rows, channels, ...)."""
        final = select(rollouts.trajectories.latents, rows, [-1] * len(rows))
        noise = torch.stack([rollouts.new_noise(rollouts.indices[row], turn) for row in rows])
        noise, levels = to_device(noise, final.device), rollouts.trained_steps[rows, turn]
        level = filled(levels.tolist(), final.device).view(-1, 1, 1, 1, 1)
        noised = (1 - level) * final + level * noise
        velocity = self.pipeline.velocity(noised, 1000 * levels, rollouts.conditions.select(rows))
        return velocity, noise - final

    def _velocity_of_nothing(self, rollouts: RolloutBatch) -> Tensor:
        nothing = torch.zeros_like(rollouts.trajectories.latents[:1, 0])
        return self.pipeline.velocity(nothing, 1000 * rollouts.trained_steps[0, :1], rollouts.conditions.select([0]))
