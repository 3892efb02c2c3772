"""DiffusionNFT (``objective nft``): a velocity loss on re-noised rollouts, in two directions.

    old velocities (with several updates per iteration) -> anchor velocities -> loss of each re-noised rollout

The loss needs no log-probabilities, so rollouts may come from any sampler. In the first update of
an iteration, the policy is still the rollout policy, and its own velocity serves as the old one
without another forward pass.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hyvideo.distributed.collectives import gather_replicas
from hyvideo.loss.nft import NFTInputs, NFTTerms, mean_square, nft_terms, relative_norm
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.on_policy_check import (
    Limited,
    OffPolicyError,
    check_limits,
    step_tolerance,
)
from hyvideo.training.rollout_batch import Pass, RolloutBatch, chunks, select

ZERO_ERROR = "the velocity error on re-noised rollouts, relative to that of a zero velocity,"
UNTRAINED = (
    "timesteps or noise are wrong, or the model is not trained (then set random_weights or "
    "gate_interval 0), or, near sigma 1, its velocity follows from a predicted noise without a "
    "smallest signal (docs/extend.md#add-a-model)"
)


@dataclass(frozen=True)
class Velocities:
    """Velocities of an iteration's re-noised rollouts that its updates compare the policy with."""

    # of the later updates' rows, by row and column
    old: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    # old, of a row of the first update in column 0, by row
    checked: dict[int, Tensor] = field(default_factory=dict)
    anchor: dict[int, Tensor] = field(default_factory=dict)  # of all rows, by column
    anchor_is_old: bool = False  # whether the old velocities are also the anchor's
    # from ``checked`` to the training pass, which adds them
    distances: list[Tensor] = field(default_factory=list)


class NFT(LevelObjective):
    """The loss of DiffusionNFT; see `Objective` for the arguments."""

    metrics = (
        "loss/policy",
        "loss/total",
        "kl/position",
        "kl/velocity",
        "nft/distance",
        "nft/contrast",
        "nft/advantage_clipped",
        "nft/error",
        "policy/velocity_norm",
    )
    deviation_names = ("nft/distance_max", "nft/distance_first")

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        # the first step that the policy makes is checked
        self.keeps_all_latents = self.pipeline.first_own_step(self.config.sampling.schedule()) > 0

    def prepare(self, rollouts: RolloutBatch) -> Velocities:
        """Return the velocities of the rollout policy that later updates need, and those of the
        anchor.
        """
        self.cache_levels(rollouts)
        if self.config.objective.updates == 1:
            return Velocities(anchor=self.anchor_predictions(rollouts))
        old, checked = self._old_velocities(rollouts)
        anchor = self.policy.anchor
        return Velocities(
            old=old,
            checked=checked,
            anchor=self.anchor_predictions(rollouts),
            anchor_is_old=anchor is not None and anchor.equals_policy,
        )

    def _old_velocities(
        self, rollouts: RolloutBatch
    ) -> tuple[dict[tuple[int, int], Tensor], dict[int, Tensor]]:
        """Return `Velocities.old` and `Velocities.checked`.

        All replicas make the same number of passes.
        """
        updates = rollouts.updates_of_rows(self.config.objective.updates)
        batches = chunks(
            [row for row, update in enumerate(updates) if update > 0], self.config.rows_per_pass
        )
        num_batches = int(gather_replicas(torch.tensor([len(batches)]), self.mesh).amax())
        batches += [[]] * (num_batches - len(batches))
        checked = [row for row, update in enumerate(updates) if update == 0][:1]
        passes = [
            Pass(checked, 0),
            *(Pass(rows, column) for rows in batches for column in rollouts.columns),
        ]
        old: dict[tuple[int, int], Tensor] = {}
        for number, (rows, column) in enumerate(passes, 1):
            self.progress.begin_pass("anchor", f"pass {number}/{len(passes)}")
            if rows:
                velocities = self.predict(rollouts, rows, column)
                old |= {
                    (row, column): velocity for row, velocity in zip(rows, velocities, strict=True)
                }
            elif self.policy.is_sharded:  # joins the forward pass of the other ranks
                with torch.no_grad():
                    self.empty_velocity(rollouts, column)
        return old, {row: old.pop((row, 0)) for row in checked}

    def terms(
        self,
        rollouts: RolloutBatch,
        reference: Velocities,
        rows: list[int],
        column: int,
        *,
        kl_coefficient: float,
    ) -> Terms:
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        own = velocity.detach()
        old = torch.stack([reference.old.get((row, column), own[i]) for i, row in enumerate(rows)])
        anchor, anchor_weight = self._anchor_of(rollouts, reference, rows, column, old)
        advantages = select(rollouts.advantages, rows)
        found = self.nft_terms(
            NFTInputs(velocity, old, target, advantages, anchor, anchor_weight), kl_coefficient
        )
        if column == 0:
            self._add_distances(reference, rows, own, target, advantages)
        norm = torch.zeros(len(rows), device=own.device)
        if anchor is not None:
            norm = anchor_weight * relative_norm(own, anchor)
        elif not reference.anchor:  # the anchor equals the policy
            norm = norm + 1.0
        return Terms(
            loss=found.loss,
            kl=found.kl,
            deviation=found.distance,
            metrics={
                "loss/policy": found.policy,
                "loss/total": found.loss,
                "kl/position": found.position,
                "kl/velocity": found.velocity,
                "nft/distance": found.distance,
                "nft/contrast": found.contrast,
                "nft/advantage_clipped": found.is_clipped,
                "nft/error": found.error,
                "policy/velocity_norm": norm,
            },
        )

    def _anchor_of(
        self,
        rollouts: RolloutBatch,
        reference: Velocities,
        rows: list[int],
        column: int,
        old: Tensor,
    ) -> tuple[Tensor | None, float]:
        """Return the velocities of the anchor, shape as ``old``, and their weight; None if it is not
        measured at this column.
        """
        if reference.anchor_is_old:
            return old, 1.0
        if column in reference.anchor:
            weight = self.anchor_weight(rollouts, reference.anchor)
            return select(reference.anchor[column], rows), weight
        return None, 1.0

    def _add_distances(
        self,
        reference: Velocities,
        rows: list[int],
        own: Tensor,
        target: Tensor,
        advantages: Tensor,
    ) -> None:
        """Add the distances of the checked rows to their velocities before any update."""
        for i, row in enumerate(rows):
            if row in reference.checked:
                one = slice(i, i + 1)
                before = reference.checked[row][None]
                inputs = NFTInputs(own[one], before, target[one], advantages[one])
                reference.distances.append(self.nft_terms(inputs).distance[0])

    def nft_terms(self, inputs: NFTInputs, kl_coefficient: float = 0.0) -> NFTTerms:
        return nft_terms(
            inputs,
            advantage_clip=self.config.reward.advantage_clip,
            kl_weights=self.config.objective.kl_weights,
            kl_coefficient=kl_coefficient,
            has_rewards=not self.config.reward.ignore_rewards,
        )

    def check_moved(self, deviation: float, iteration: int, *, is_fresh: bool) -> None:
        """Raise OffPolicyError if the policy still equals the old policy after an update of this
        iteration.
        """
        if deviation == 0 and not is_fresh:
            raise OffPolicyError(
                f"iteration {iteration}, objective nft: the old policy still equals the policy "
                "after an update, so the two directions of the loss have no contrast: the old "
                "velocities are not those of the rollout policy, or the update was too small to "
                "change any velocity; raise learning_rate"
            )

    def check_fresh(
        self,
        rollouts: RolloutBatch,
        reference: Velocities,
        passes: list[Pass],
        losses: list[Tensor],
        deviations: list[Tensor],
        iteration: int,
    ) -> None:
        """Raise OffPolicyError, on all ranks together, if the first update violates an invariant:
        the policy equals the rollout policy and the old policy, its velocity is closer to the
        target than zero is, unless its weights are random, and the best and the worst rollouts have
        opposite gradients. Checks that need extra forward passes run only after the first pass.
        """
        rows = [row for a_pass in passes for row in a_pass.rows]
        checked = {}
        is_first_pass = len(deviations) == 1
        if is_first_pass:
            checked = self._checked_values(rollouts, rows[0] if rows else 0)
        distance = torch.stack([*deviations, *reference.distances]).amax()
        text = "the distance to the old policy before any update"
        checked[text] = Limited(distance, step_tolerance(self.config.model.dtype))
        if not rows:  # rollouts without a reward may contain NaN
            nothing = torch.full_like(distance, -1.0)
            checked = {name: each._replace(value=nothing) for name, each in checked.items()}
        check_limits(f"iteration {iteration}, objective nft", checked, self.mesh)

    def _checked_values(self, rollouts: RolloutBatch, row: int) -> dict[str, Limited]:
        """Return what is checked for one rollout, by what it is."""
        # The velocity at a wrong noise level deviates most there.
        noisiest = int(rollouts.trained_steps[row].argmax())
        with torch.no_grad():
            velocity, target = self.velocity_and_target(rollouts, [row], noisiest)
            replay_distance = self._replay_distance(rollouts, row)
            zero_error = mean_square(target)
        self.cost.add(self.num_forwards(rollouts, [row], noisiest))
        first = self.pipeline.first_own_step(rollouts.schedule)
        self.cost.add(self.pipeline.num_forwards(rollouts.schedule.timesteps[[first]]))
        checked = {
            "the distance between a rollout's first step and its replay": Limited(
                replay_distance, step_tolerance(self.config.model.dtype)
            ),
            "the gradient of the worst rollouts, relative to that of the best rollouts,": Limited(
                self._contrast(velocity, target), -0.5
            ),
        }
        if not self.config.model.random_weights:
            error = mean_square(velocity - target) / zero_error
            # Guidance adds the distance between its branches.
            limit = max(1.0, self.config.policy_cfg_scale) ** 2
            sigma = rollouts.trained_steps[row, noisiest].item()
            checked[ZERO_ERROR] = Limited(
                error, limit, f"measured at sigma {sigma:.3g}; {UNTRAINED}"
            )
        return checked

    def _contrast(self, velocity: Tensor, target: Tensor) -> Tensor:
        """Return the loss gradient at the lowest advantage divided by that at the highest;
        expected: -1. Shape: ().
        """
        probe = velocity.clone().requires_grad_()
        clip = self.config.reward.advantage_clip
        losses = [
            self.nft_terms(NFTInputs(probe, velocity, target, target.new_tensor([a])))
            for a in (-clip, clip)
        ]
        gradients = (torch.autograd.grad(terms.policy.sum(), probe)[0] for terms in losses)
        worst, best = ((gradient * (velocity - target)).sum() for gradient in gradients)
        return worst / best

    def _replay_distance(self, rollouts: RolloutBatch, row: int) -> Tensor:
        """Return the distance between the first step that the policy makes and its replay, in units
        of the step.

        Shape: ().
        """
        first = self.pipeline.first_own_step(rollouts.schedule)
        latents = rollouts.trajectories.latents
        before, after = (select(latents, [row], [index]) for index in (first, first + 1))
        step = rollouts.replay(self.pipeline, [row], torch.tensor([first]))
        if rollouts.schedule.transitions[first].is_stochastic:
            return (step.log_prob - rollouts.trajectories.log_probs[row, [first]]).abs().squeeze()
        return (mean_square(step.mean - after) / mean_square(after - before)).sqrt().squeeze()
