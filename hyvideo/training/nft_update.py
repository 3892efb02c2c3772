"""DiffusionNFT policy update (``objective nft``): a velocity loss on re-noised rollouts.

    old velocities (with several updates per iteration) -> anchor velocities -> loss, gradients, step (`PolicyUpdate`)

The loss needs no log-probabilities, so rollouts may come from any sampler. In the first update of an iteration, the
policy is still the rollout policy, and its own velocity serves as the old one without another forward pass.
"""

import torch
from torch import Tensor

from hyvideo.distributed.collectives import gather_ranks, gather_replicas
from hyvideo.grpo.loss import LossTerms
from hyvideo.grpo.metrics import UpdateResult
from hyvideo.grpo.nft import NFTInputs, mean_square, nft_terms
from hyvideo.models.conditions import to_device
from hyvideo.schedulers.schedule import filled
from hyvideo.training.on_policy_check import OffPolicyError
from hyvideo.training.policy_update import Pass, PolicyUpdate, UpdateWork, chunks
from hyvideo.training.rollout_batch import RolloutBatch, select

# Relative rounding errors of a step: if only the order of additions differs; if batch shapes differ in bf16.
EXACT_STEP, ROUNDED_STEP = 1e-4, 5e-2
ZERO_ERROR = "the velocity error on re-noised rollouts, relative to that of a zero velocity, is"
UNTRAINED = "timesteps or noise are wrong, or the model is not trained (then set random_weights or gate_interval 0)"


class NFTUpdate(PolicyUpdate):
    """Trains the policy with the DiffusionNFT loss; see `PolicyUpdate` for the arguments."""

    old_velocities: dict[tuple[int, int], Tensor] = {}  # of the later updates' rows, by row and column
    checked: dict[int, Tensor] = {}  # old velocity of a row of the first update in column 0, by row
    _distances: tuple[Tensor, ...] = ()  # from ``checked`` to the velocity of its training pass
    _anchor_is_old = False  # whether the old velocities are also the anchor's
    _has_moved = False  # whether the last update had a nonzero gradient

    def needs_means(self) -> bool:
        return False

    def anchor_means(self, rollouts: RolloutBatch) -> dict[int, Tensor]:
        """Return the anchor's velocities like `PolicyUpdate.anchor_means`, and store those of the rollout policy."""
        self.pipeline.prepare([(timestep, None) for timestep in (1000 * rollouts.trained_steps).flatten().tolist()])
        anchor, has_several = self.policy.anchor, self.num_updates > 1
        if has_several:
            self._compute_old_velocities(rollouts)
        self._anchor_is_old = has_several and anchor is not None and anchor.equals_policy
        return {} if anchor and anchor.equals_policy else super().anchor_means(rollouts)

    @torch.no_grad()
    def _compute_old_velocities(self, rollouts: RolloutBatch) -> None:
        """Store the velocities of the rows of later updates, and of one row of the first update for the check.

        All replicas make the same number of passes.
        """
        updates = rollouts.updates_of_rows(self.num_updates)
        batches = chunks([row for row, update in enumerate(updates) if update > 0], self.config.rows_per_pass)
        num_batches = int(gather_replicas(torch.tensor([len(batches)]), self.mesh).amax())
        batches += [[]] * (num_batches - len(batches))
        checked = [row for row, update in enumerate(updates) if update == 0][:1]
        passes = [Pass(checked, 0), *(Pass(rows, column) for rows in batches for column in rollouts.columns)]
        self.old_velocities, self._distances = {}, ()
        for number, (rows, column) in enumerate(passes, 1):
            self.on_stage("anchor", f"pass {number}/{len(passes)}")
            self.check()
            if rows:
                self.old_velocities |= zip(((row, column) for row in rows), self._mean(rollouts, Pass(rows, column)))
            elif self.policy.is_sharded:  # joins the forward pass of the other ranks
                self._dummy_velocity(rollouts, column)
        self.checked = {row: self.old_velocities.pop((row, 0)) for row in checked}

    def terms(
        self, rollouts: RolloutBatch, rows: list[int], column: int, anchor_mean: Tensor | None, anchor_weight: float = 1
    ) -> LossTerms:
        """Return the loss terms of ``rows`` at their noise levels in ``column``, from one training forward pass."""
        velocity, target = self._velocity(rollouts, rows, column)
        own = velocity.detach()
        old = torch.stack([self.old_velocities.get((row, column), own[i]) for i, row in enumerate(rows)])
        if self._anchor_is_old:
            anchor_mean, anchor_weight = old, 1
        advantages = select(rollouts.advantages, rows)
        terms = self._nft_terms(NFTInputs(velocity, old, target, advantages, anchor_mean, anchor_weight))
        for row in self.checked.keys() & {*rows} if column == 0 else ():
            i = rows.index(row)
            inputs = NFTInputs(own[i : i + 1], self.checked[row][None], target[i : i + 1], advantages[i : i + 1])
            self._distances = (self._nft_terms(inputs).largest_deviation(),)
        return terms

    def _nft_terms(self, inputs: NFTInputs) -> LossTerms:
        return nft_terms(
            inputs,
            advantage_clip=self.config.reward.advantage_clip,
            kl_weights=self.config.kl_weights,
            kl_coefficient=self.kl_coefficient.value,
            has_rewards=not self.config.reward.ignore_rewards,
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
        """Raise OffPolicyError, on all ranks together, if the first update violates an invariant: the policy equals the
        rollout policy and the old policy, its velocity is closer to the target than zero is, unless its weights are
        random, and the best and the worst rollouts have opposite gradients. Checks that need extra forward passes run
        only after the first pass."""
        rows = [row for a_pass in work.passes for row in a_pass.rows]
        checked = self._checked_values(work.rollouts, rows[0] if rows else 0) if len(deviations) == 1 else {}
        distance = torch.stack([*deviations, *self._distances]).amax()
        checked["the distance to the old policy before any update is"] = distance, self._tolerance
        values = torch.stack([value.flatten()[0] for value, _ in checked.values()])
        # Rollouts without a reward may contain NaN.
        largest = gather_ranks(values if rows else torch.full_like(values, -1.0), self.mesh).amax(0).tolist()
        for (text, (_, limit)), value in zip(checked.items(), largest):
            if not value <= limit:
                advice = f"; {UNTRAINED}" if text == ZERO_ERROR else ""
                raise OffPolicyError(
                    f"iteration {work.iteration}, objective nft: {text} {value:.3g}, above {limit:g}{advice}"
                )

    def _checked_values(self, rollouts: RolloutBatch, row: int) -> dict[str, tuple[Tensor, float]]:
        """Return checked values and their limits for one rollout, by the text of the error. Shape of each: ()."""
        noisiest = int(rollouts.trained_steps[row].argmax())  # the velocity at a wrong noise level deviates most there
        with torch.no_grad():
            velocity, target = self._velocity(rollouts, [row], noisiest)
            replay_distance, zero_error = self._replay_distance(rollouts, row), mean_square(target)
        replayed = rollouts.schedule.timesteps[:1]
        for timesteps in (self._timesteps(rollouts, [row], noisiest), replayed):
            self.cost.add(self.pipeline.num_forwards(timesteps))
        checked = {
            "the distance between a rollout's first step and its replay is": (replay_distance, self._tolerance),
            "the gradient of the worst rollouts, relative to that of the best rollouts, is": (
                self._contrast(velocity, target),
                -0.5,
            ),
        }
        if not self.config.model.random_weights:
            error = mean_square(velocity - target) / zero_error
            # Guidance adds the distance between its branches.
            checked[ZERO_ERROR] = error, max(1.0, self.pipeline.sampling.guidance_scale) ** 2
        return checked

    def _contrast(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Return the loss gradient at the lowest advantage divided by that at the highest; expected: -1. Shape: ()."""
        probe, clip = velocity.clone().requires_grad_(), self.config.reward.advantage_clip
        losses = [self._nft_terms(NFTInputs(probe, velocity, target, target.new_tensor([a]))) for a in (-clip, clip)]
        gradients = (torch.autograd.grad(terms.policy.sum(), probe)[0] for terms in losses)
        worst, best = ((gradient * (velocity - target)).sum() for gradient in gradients)
        return worst / best

    @property
    def _tolerance(self) -> float:
        """Largest difference explained by rounding, if kernels or batch shapes differ in bf16."""
        return EXACT_STEP if self.config.model.dtype == "fp32" else ROUNDED_STEP

    def _replay_distance(self, rollouts: RolloutBatch, row: int) -> Tensor:
        """Return the distance between a rollout's first step and its replay, in units of the step. Shape: ()."""
        before, after = (select(rollouts.trajectories.latents, [row], [index]) for index in (0, 1))
        step = rollouts.replay(self.pipeline, [row], torch.tensor([0]))
        if rollouts.schedule.transitions[0].is_stochastic:
            return (step.log_prob - rollouts.trajectories.log_probs[row, :1]).abs().squeeze()
        return (mean_square(step.mean - after) / mean_square(after - before)).sqrt().squeeze()

    @torch.no_grad()
    def _mean(self, rollouts: RolloutBatch, a_pass: Pass) -> Tensor:
        self.cost.add(self.pipeline.num_forwards(self._timesteps(rollouts, *a_pass)))
        return self._velocity(rollouts, *a_pass)[0]

    def _velocity(self, rollouts: RolloutBatch, rows: list[int], column: int) -> tuple[Tensor, Tensor]:
        """Return the velocity at re-noised rollouts and its target. Shape of each: (rows, channels, ...)."""
        final = select(rollouts.trajectories.latents, rows, [-1] * len(rows))
        noise = torch.stack([rollouts.new_noise(rollouts.indices[row], column) for row in rows])
        noise, levels = to_device(noise, final.device), rollouts.trained_steps[rows, column]
        level = filled(levels.tolist(), final.device).view(-1, 1, 1, 1, 1)
        noised = (1 - level) * final + level * noise
        return self._velocity_at(rollouts, rows, column, noised), noise - final

    def _velocity_at(self, rollouts: RolloutBatch, rows: list[int], column: int, latents: Tensor) -> Tensor:
        timesteps = self._timesteps(rollouts, rows, column)
        return self.pipeline.velocity(latents, timesteps, rollouts.conditions.select(rows))

    def _timesteps(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        return 1000 * rollouts.trained_steps[rows, column]
