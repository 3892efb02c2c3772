"""DiffusionNFT policy update (``objective nft``): a velocity loss on re-noised rollouts.

    old velocities (with several updates per iteration) -> anchor velocities -> loss, gradients, step (`PolicyUpdate`)

The loss needs no log-probabilities, so rollouts may come from any sampler. With one update per iteration, the policy is
still the rollout policy, and its own velocity serves as the old one without another forward pass.
"""

import torch
from torch import Tensor

from hyvideo.distributed.collectives import gather_ranks
from hyvideo.grpo.loss import LossTerms
from hyvideo.grpo.metrics import UpdateResult
from hyvideo.grpo.nft import NFTInputs, mean_square, nft_terms
from hyvideo.models.conditions import to_device
from hyvideo.schedulers.scheduling_flow_match_discrete import filled
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.policy_update import Pass, PolicyUpdate, UpdateWork
from hyvideo.training.rollout_batch import RolloutBatch, select

# Relative rounding error of a step: if only the order of additions differs, and in bf16 with other batch shapes.
EXACT_STEP, ROUNDED_STEP = 1e-4, 5e-2


class NFTUpdate(PolicyUpdate):
    """Trains the policy with the DiffusionNFT loss; see `PolicyUpdate` for the arguments."""

    old_velocities: Tensor | None = None  # (rollouts, turns, channels, ...); None with one update per iteration
    _has_moved = False  # the last update had a nonzero gradient

    def reads_means(self) -> bool:
        return False

    def anchor_means(self, rollouts: RolloutBatch) -> Tensor | None:
        """Return the anchor's velocities, as `PolicyUpdate.anchor_means` does, and store those of the old policy."""
        self.old_velocities = self._means(rollouts, rollouts.turns) if self.num_updates > 1 else None
        if self.policy.anchor and self.policy.anchor.equals_policy:
            return self.old_velocities
        return super().anchor_means(rollouts)

    def terms(
        self, rollouts: RolloutBatch, rows: list[int], turn: int, anchor_mean: Tensor | None, anchor_weight: float = 1.0
    ) -> LossTerms:
        """Compute the loss terms of one training forward pass, each row at the ``turn``-th of its noise levels."""
        velocity, target = self._velocity(rollouts, rows, turn)
        old = velocity.detach() if self.old_velocities is None else select(self.old_velocities[:, turn], rows)
        advantages = select(rollouts.advantages, rows)
        return self._terms_of(NFTInputs(velocity, old, target, advantages, anchor_mean, anchor_weight))

    def _terms_of(self, inputs: NFTInputs) -> LossTerms:
        return nft_terms(
            inputs,
            advantage_clip=self.config.reward.advantage_clip,
            kl_weights=self.kl_weights,
            kl_coefficient=self.kl_coefficient.value,
        )

    def _one_update(self, work: UpdateWork) -> UpdateResult | None:
        result = super()._one_update(work)
        if not work.is_fresh and self._has_moved and result:
            assert result.metrics["policy/ratio_max_deviation"] > 0, (
                "the old policy still equals the policy after an update, so the NFT branches have no contrast: the old "
                "velocities are not those of the rollout policy, or the update was too small to change any velocity"
            )
        self._has_moved = result is not None and result.metrics["grad/norm"] * result.metrics["lr"] > 0
        return result

    def _check_fresh(self, work: UpdateWork, deviations: list[Tensor]) -> None:
        """Raise OffPolicyError, on all ranks together, if an invariant of the first update does not hold: the policy is
        the rollout policy and the old policy, predicts noise better than a zero velocity, and the best and the worst
        rollouts have opposite gradients. Checks that need forward passes run only after the first pass."""
        rows = [row for a_pass in work.passes for row in a_pass.rows]
        found = self._findings(work.rollouts, rows[0] if rows else 0) if len(deviations) == 1 else {}
        found["the distance to the old policy before any update is"] = torch.stack(deviations).amax(), self._tolerance
        values = torch.stack([value.flatten()[0] for value, _ in found.values()])
        # Rollouts without a reward may contain NaN.
        largest = gather_ranks(values if rows else torch.full_like(values, -1.0), self.mesh).amax(0).tolist()
        for (text, (_, bound)), value in zip(found.items(), largest):
            if not value <= bound:
                raise OffPolicyError(f"iteration {work.iteration}, objective nft: {text} {value:.3g}, above {bound:g}")

    def _findings(self, rollouts: RolloutBatch, row: int) -> dict[str, tuple[Tensor, float]]:
        """Return the checked quantities of one rollout and their limits, by the text of the error message."""
        noisiest = int(rollouts.trained_steps[row].argmax())  # where a velocity of a wrong noise level deviates most
        with torch.no_grad():
            velocity, target = self._velocity(rollouts, [row], noisiest)
            off_rollout, zeros = self._off_rollout(rollouts, row), mean_square(target)
        scored = {(rollouts.indices[i].group, r.total) for i, r in rollouts.rewards.items() if not r.is_missing}
        differ = len(scored) > len({group for group, _ in scored})
        is_flat = zeros.new_tensor(differ and not rollouts.advantages.nan_to_num().any(), dtype=torch.float)
        return {
            "the distance between a rollout's first step and its replay is": (off_rollout, self._tolerance),
            "the velocity error on re-noised rollouts, relative to that of a zero velocity, is": (
                mean_square(velocity - target) / zeros,
                max(1.0, self.pipeline.sampling.guidance_scale) ** 2,  # guidance adds the distance between its branches
            ),
            "the gradient of the worst rollouts, relative to that of the best rollouts, is": (
                self._contrast(velocity, target),
                -0.5,
            ),
            "the rewards of a group differ, but all advantages are 0:": (is_flat, 0.0),
        }

    def _contrast(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Return the loss slope at the lowest advantage over that at the highest; -1 is expected. Shape: ()."""
        probe, clip = velocity.clone().requires_grad_(), self.config.reward.advantage_clip
        losses = [self._terms_of(NFTInputs(probe, velocity, target, target.new_tensor([a]))) for a in (-clip, clip)]
        gradients = (torch.autograd.grad(terms.policy.sum(), probe)[0] for terms in losses)
        worst, best = ((gradient * (velocity - target)).sum() for gradient in gradients)
        return worst / best

    @property
    def _tolerance(self) -> float:
        """Largest difference explained by rounding."""
        return EXACT_STEP if self.config.model.dtype == "fp32" or not self.config.is_batched else ROUNDED_STEP

    def _off_rollout(self, rollouts: RolloutBatch, row: int) -> Tensor:
        """Return the distance between a rollout's first step and its replay, in units of the step. Shape: ()."""
        before, after = (select(rollouts.trajectories.latents, [row], [place]) for place in (0, 1))
        timestep = self.pipeline.scheduler.timesteps[:1]
        step = self.pipeline.replay(before, after, timestep, rollouts.conditions.select([row]))
        if self.pipeline.sampling.eta > 0:
            return (step.log_prob - rollouts.trajectories.log_probs[row, :1]).abs().squeeze()
        return (mean_square(step.prev_sample_mean - after) / mean_square(after - before)).sqrt().squeeze()

    @torch.no_grad()
    def _mean(self, rollouts: RolloutBatch, a_pass: Pass) -> Tensor:
        self.cost.forwards += self.pipeline.num_forwards(self._timesteps(rollouts, *a_pass))
        return self._velocity(rollouts, *a_pass)[0]

    def _velocity(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> tuple[Tensor, Tensor]:
        """Return the velocity at re-noised rollouts and its target. Shape of each: (rows, channels, ...)."""
        final = select(rollouts.trajectories.latents, rows, [-1] * len(rows))
        noise = torch.stack([rollouts.new_noise(rollouts.indices[row], turn) for row in rows])
        noise, levels = to_device(noise, final.device), rollouts.trained_steps[rows, turn]
        level = filled(levels.tolist(), final.device).view(-1, 1, 1, 1, 1)
        noised = (1 - level) * final + level * noise
        timesteps = self._timesteps(rollouts, rows, turn)
        velocity = self.pipeline.velocity(noised, timesteps, rollouts.conditions.select(rows))
        return velocity, noise - final

    def _timesteps(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> Tensor:
        return 1000 * rollouts.trained_steps[rows, turn]
