"""Policy update of GRPO: anchor means, clipped loss with KL terms, accumulated gradients, optimizer step.

The rollouts of an iteration are trained in one or several updates. Every update accumulates gradients over all its
rollouts and trained steps. Gathering sharded weights is a collective, so all ranks make the same number of passes;
replicas with fewer rollouts make empty passes.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hyvideo.config.sections import TrustRegionSettings
from hyvideo.config.settings import Config
from hyvideo.distributed.collectives import (
    average_gradients,
    clip_gradients,
    gather_ranks,
    gather_replicas,
    sum_over_replicas,
)
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.loss import LossInputs, LossTerms, grpo_terms
from hyvideo.grpo.metrics import UpdateResult, average, sums_by_step
from hyvideo.grpo.trust_region import KLCoefficient, KLScheduleSettings
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.schedulers.schedule import Schedule, filled
from hyvideo.training.anchor import Anchor
from hyvideo.training.nonfinite_updates import NonFiniteUpdates
from hyvideo.training.on_policy_check import OnPolicyCheck
from hyvideo.training.optimizers import learning_rate
from hyvideo.training.policy import Policy
from hyvideo.training.rollout_batch import RolloutBatch, select
from hyvideo.training.rollout_collector import Cost

T = TypeVar("T")


class Pass(NamedTuple):
    """One training forward and backward pass over some rollouts, each at one of its trained steps."""

    rows: list[int]  # of `RolloutBatch`; empty if this replica has fewer rollouts than others
    column: int  # of `RolloutBatch.trained_steps`


class UpdateWork(NamedTuple):
    """Inputs of one optimizer update."""

    rollouts: RolloutBatch
    passes: list[Pass]
    num_terms: int  # (rollout, step) pairs over all replicas
    anchor_means: Mapping[int, Tensor]  # from `PolicyUpdate.anchor_means`
    iteration: int
    is_fresh: bool  # whether the policy is still the rollout policy


class PolicyUpdate:
    """Trains the policy on the rollouts of an iteration."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pipeline: GRPOPipeline,
        policy: Policy,
        *,
        num_updates: int,  # optimizer updates per iteration
        cost: Cost,  # counts forward passes and FLOPs
        on_stage: Callable[..., None] = lambda *stage: None,  # called with the stage and the current pass
        check: Callable[[], None] = lambda: None,  # called before each pass until the first step; may raise
    ):
        self.config, self.mesh, self.pipeline, self.policy = config, mesh, pipeline, policy
        self.num_updates, self.cost, self.on_stage, self.check = num_updates, cost, on_stage, check
        settings = config.trust_region
        self._is_gaussian = config.measures_velocity and settings.kl_velocity == "gaussian"
        self.kl_coefficient = KLCoefficient(kl_schedule(settings, config.kl_strategy, config.kl_warmup))
        self.update_count = 0
        self.steps_begun = 0  # optimizer steps of this process, also one that failed; it may have changed some weights
        self.nonfinite = NonFiniteUpdates(mesh, max_bad_updates=config.optimizer.max_bad_updates)
        self.on_policy_check = OnPolicyCheck(
            mesh, pipeline, config.loss, dtype=config.model.dtype, batch_size=config.rollout.batch_size
        )

    def step_weights(self, schedule: Schedule) -> Tensor:
        """Return the weight of the policy term at each step, 0 at deterministic ones. Shape: (steps,), on the CPU."""
        if self.config.loss.use_grad_balancing:
            return schedule.equalizer_weights
        return (schedule.equalizer_weights > 0).float()

    def needs_means(self) -> bool:
        """Return whether the updates need the rollouts' transition means: for the closed form of the velocity KL, or
        for the position KL while the anchor equals the policy."""
        anchor = self.policy.anchor
        return self._is_gaussian or (anchor is not None and anchor.equals_policy)

    def anchor_means(self, rollouts: RolloutBatch) -> dict[int, Tensor]:
        """Return the anchor's means at the drawn trained transitions, by column; empty without an anchor.

        An anchor that equals the rollout policy has the rollouts' means at all trained steps, without a forward pass.
        Shape of each: (rollouts, channels, frames, height, width).
        """
        anchor = self.policy.anchor
        if anchor is None:
            return {}
        if anchor.equals_policy:
            return {column: rollouts.trajectories.means[:, column] for column in rollouts.columns}
        with self._as_anchor(anchor):
            return self._means(rollouts, rollouts.anchor_columns)

    @contextmanager
    def _as_anchor(self, anchor: Anchor) -> Iterator[None]:
        """Use the anchor's weights and guidance scale within the context."""
        sampling = self.pipeline.sampling
        with anchor.swapped_in():
            self.pipeline.sampling = replace(sampling, guidance_scale=self.config.anchor_cfg_scale)
            try:
                yield
            finally:
                self.pipeline.sampling = sampling

    def _means(self, rollouts: RolloutBatch, columns: Sequence[int]) -> dict[int, Tensor]:
        """Return the means at these columns under the current weights. Shape of each: (rollouts, channels, ...)."""
        means = {column: torch.empty_like(rollouts.trajectories.latents[:, 0]) for column in columns}
        passes = list(product(chunks(range(len(rollouts)), self.config.rows_per_pass), columns))
        for number, (rows, column) in enumerate(passes, 1):
            self.on_stage("anchor", f"pass {number}/{len(passes)}")
            self.check()
            means[column][rows[0] : rows[-1] + 1] = self._mean(rollouts, Pass(rows, column))
        return means

    def __call__(
        self, rollouts: RolloutBatch, anchor_means: Mapping[int, Tensor], iteration: int
    ) -> dict[str, float | list]:
        """Run the updates of an iteration and return their metrics, averaged over the trained terms."""
        all_rows = [rollouts.rows_of_update(update, self.num_updates) for update in range(self.num_updates)]
        num_rollouts = sum_over_replicas(torch.tensor([len(rows) for rows in all_rows]), self.mesh).tolist()
        has_advantage = (rollouts.advantages != 0).tolist()
        local_signals = torch.tensor([sum(has_advantage[row] for row in rows) for rows in all_rows])
        num_signals = sum_over_replicas(local_signals, self.mesh).tolist()  # rollouts with a nonzero advantage
        all_batches = [chunks(rows, self.config.rows_per_pass) for rows in all_rows]
        lengths = gather_replicas(torch.tensor([len(batches) for batches in all_batches]), self.mesh).amax(0).tolist()
        results: list[UpdateResult | None] = []
        without_signal = without_reward = 0
        for batches, num_batches, count, num_signal in zip(all_batches, lengths, num_rollouts, num_signals):
            if count == 0:  # all rewards of the update are missing
                continue
            if num_signal == 0 and not self.config.reward.ignore_rewards:
                if not self._kl_has_signal(has_moved=any(result is not None for result in results)):
                    without_signal += 1
                    continue
                without_reward += 1
            batches = batches + [[]] * (num_batches - len(batches))
            passes = [Pass(rows, column) for rows in batches for column in rollouts.columns]
            num_terms = count * len(rollouts.columns)
            work = UpdateWork(rollouts, passes, num_terms, anchor_means, iteration, is_fresh=not results)
            results.append(self._one_update(work))
        if self.policy.anchor:
            self.policy.anchor.after_iteration()
        if self.mesh.is_main:
            _print_without_signal(iteration, skipped=without_signal, with_kl_alone=without_reward)
        applied = [result for result in results if result is not None]
        return average(applied) | {
            "update/skipped": float(len(results) - len(applied)),
            "update/without_signal": float(without_signal),
        }

    def _kl_has_signal(self, *, has_moved: bool) -> bool:
        """Return whether the KL terms have a gradient that is not only rounding; the same on all ranks.

        The KL to the anchor has none while the anchor equals the policy, and the KL to the rollout policy has none
        before the first update of an iteration: ``has_moved`` says whether the policy has left the rollout policy.
        """
        anchor, weights = self.policy.anchor, self.config.kl_weights
        is_pulled = weights.position != 0 and anchor is not None and not anchor.equals_policy
        return self.kl_coefficient.value > 0 and (is_pulled or (weights.velocity != 0 and has_moved))

    def _one_update(self, work: UpdateWork) -> UpdateResult | None:
        """Run one optimizer update and return its metrics; None if it was skipped because of NaN or inf."""
        sums, deviations, by_term = self._accumulate(work)
        if work.is_fresh and self.num_updates > 1:  # with one update, the iteration ends right after the step
            self.check()
        applied = {"kl/coef": self.kl_coefficient.value, "lr": learning_rate(self.config.optimizer, self.update_count)}
        # Copied to the CPU before the optimizer step, because a later copy would wait for it.
        sums = sum_over_replicas(sums, self.mesh).cpu() / work.num_terms
        by_rank = gather_ranks(deviations.amax(), self.mesh).cpu()
        by_step = self._by_step(work, by_term.cpu())
        grad_norm = self._step(applied["lr"], sums, by_rank, work)
        if grad_norm is None:
            return None
        metrics = dict(zip(LossTerms.SUMMED, sums.tolist())) | applied
        metrics |= {
            "policy/ratio_max_deviation": by_rank.amax().item(),
            "grad/norm": grad_norm,
            "grad/spike": self.nonfinite.spike(grad_norm, work.iteration),
        }
        if self.policy.anchor is None:
            metrics["kl/position"] = math.nan  # not measured
        self.kl_coefficient.observe(metrics.pop("kl/total"))
        self.policy.after_update()
        return UpdateResult(metrics, work.num_terms, by_step)

    def _accumulate(self, work: UpdateWork) -> tuple[Tensor, Tensor, Tensor]:
        """Accumulate gradients; return sums of terms (8,), largest |ratio - 1| (passes,), and ratio and KL (2, terms).

        Every replica divides by ``num_terms``, the number over all replicas, so that each term has the same weight in
        any layout. Gradients are later averaged over the replicas; the factor ``num_replicas`` turns that into a sum.
        """
        sums = torch.zeros(len(LossTerms.SUMMED), dtype=torch.float64, device=self.pipeline.device)
        deviations: list[Tensor] = []
        pairs = [sums.new_empty(2, 0)]
        rollouts, passes = work.rollouts, work.passes
        needs_check = work.is_fresh and self.on_policy_check.is_due(work.iteration)
        anchor_weight = len(rollouts.columns) / max(1, len(work.anchor_means))
        for number, (rows, column) in enumerate(passes):
            self.on_stage("update", f"pass {number + 1}/{len(passes)} of update {self.update_count + 1}")
            if work.is_fresh:
                self.check()
            self.policy.before_backward(is_last=number == len(passes) - 1)
            if rows:
                anchor_mean = select(work.anchor_means[column], rows) if column in work.anchor_means else None
                terms = self.terms(rollouts, rows, column, anchor_mean, anchor_weight)
                (terms.loss.sum() * self.mesh.num_replicas / work.num_terms).backward()
                sums += terms.sums()
                deviations.append(terms.largest_deviation())
                pairs.append(torch.stack([terms.ratio, terms.kl.detach()]))
            else:
                if self.policy.is_sharded:  # joins the collectives of the other ranks
                    (self._dummy_velocity(rollouts, column).sum() * 0.0).backward()
                deviations.append(sums.new_zeros((), dtype=torch.float32))
            if needs_check and number in (0, len(passes) - 1):  # early, and again before the weights change
                self._check_fresh(work, deviations)
        num_forwards = sum(self.pipeline.num_forwards(self._timesteps(rollouts, *a_pass)) for a_pass in passes)
        self.cost.add(num_forwards, kind="training")
        return sums, torch.stack(deviations), torch.cat(pairs, dim=1)

    def _by_step(self, work: UpdateWork, pairs: Tensor) -> Tensor | None:
        """Return `sums_by_step` over all replicas; None for nft, which trains noise levels. Shape: (4, steps)."""
        trained_steps = work.rollouts.trained_steps
        if trained_steps.is_floating_point():
            return None
        steps = torch.cat([trained_steps[rows, column] for rows, column in work.passes])
        local = sums_by_step(*pairs, steps, len(work.rollouts.schedule.transitions))
        gathered = gather_replicas(local, self.mesh)  # (replicas, 4, steps)
        return torch.cat([gathered[:, :3].sum(0), gathered[:, 3:].amax(0)])

    def _check_fresh(self, work: UpdateWork, deviations: list[Tensor]) -> None:
        self.on_policy_check(work.rollouts, work.passes, deviations, work.iteration)

    def terms(
        self, rollouts: RolloutBatch, rows: list[int], column: int, anchor_mean: Tensor | None, anchor_weight: float = 1
    ) -> LossTerms:
        """Return the loss terms of ``rows`` at their trained steps in ``column``, from one training forward pass."""
        steps = rollouts.trained_steps[rows, column]
        step = rollouts.replay(self.pipeline, rows, steps)
        device = self.pipeline.device
        position_weights = filled(rollouts.schedule.position_kl_weights[steps].tolist(), device)
        inputs = LossInputs(
            log_prob=step.log_prob,
            mean=step.mean,
            std=step.std,
            old_log_prob=select(rollouts.trajectories.log_probs, rows, steps),
            advantages=select(rollouts.advantages, rows),
            step_weights=filled(self.step_weights(rollouts.schedule)[steps].tolist(), device),
            anchor_mean=anchor_mean,
            anchor_weight=anchor_weight * position_weights,
            rollout_mean=select(rollouts.trajectories.means[:, column], rows) if self._is_gaussian else None,
        )
        return grpo_terms(
            inputs,
            clip_range=self.config.loss.clip_range,
            kl_weights=self.config.kl_weights,
            kl_coefficient=self.kl_coefficient.value,
        )

    def _step(self, lr: float, sums: Tensor, deviations: Tensor, work: UpdateWork) -> float | None:
        """Average, clip and apply the gradients; return the norm before clipping, or None if a rank has NaN or inf."""
        average_gradients(self.policy.parameters, self.mesh, is_sharded=self.policy.is_sharded)
        grad_norm = clip_gradients(self.policy.parameters, self.config.optimizer.max_grad_norm)
        if math.isfinite(grad_norm) and sums.isfinite().all():
            self.nonfinite.record_finite()
            self.steps_begun += 1
            self.policy.optimizers.step(lr)
            self.update_count += 1
            return grad_norm
        self.policy.optimizers.zero_grad()
        ranks = (~deviations.isfinite()).nonzero().flatten().tolist()
        self.nonfinite.record_skipped(ranks=ranks, iteration=work.iteration)
        return None

    @torch.no_grad()
    def _mean(self, rollouts: RolloutBatch, a_pass: Pass) -> Tensor:
        """Return the means of a pass under the current weights. Shape: (rows, channels, frames, height, width)."""
        rows, column = a_pass
        self.cost.add(self.pipeline.num_forwards(self._timesteps(rollouts, *a_pass)))
        return rollouts.replay(self.pipeline, rows, rollouts.trained_steps[rows, column]).mean

    def _timesteps(self, rollouts: RolloutBatch, rows: list[int], column: int) -> Tensor:
        """Return the timesteps of the rows of a pass, on the CPU. Shape: (rows,)."""
        return rollouts.schedule.timesteps[rollouts.trained_steps[rows, column]]

    def _velocity_at(self, rollouts: RolloutBatch, rows: list[int], column: int, latents: Tensor) -> Tensor:
        """Return the velocity of given latents at the trained steps of the rows. Shape: that of ``latents``."""
        steps = rollouts.trained_steps[rows, column].tolist()
        return self.pipeline.velocity_at_steps(latents, rollouts.schedule, steps, rollouts.conditions.select(rows))

    def _dummy_velocity(self, rollouts: RolloutBatch, column: int) -> Tensor:
        """Return the velocity of zero latents with the column's branches; rollouts without a reward may contain NaN."""
        zeros = torch.zeros_like(rollouts.trajectories.latents[:1, 0])
        return self._velocity_at(rollouts, [0], column, zeros)


def _print_without_signal(iteration: int, *, skipped: int, with_kl_alone: int) -> None:
    """Print how many updates had no reward to learn from: Adam and Muon would turn rounding into full steps."""
    reason = "because the rewards of each group are equal; see advantage/zero_groups in docs/troubleshooting.md"
    if skipped:
        print(f"\niteration {iteration}: number of updates skipped: {skipped}, {reason}", file=sys.stderr, flush=True)
    if with_kl_alone:
        count = f"number of updates that train the KL alone: {with_kl_alone}"
        print(f"\niteration {iteration}: {count}, {reason}", file=sys.stderr, flush=True)


def chunks(values: Sequence[T], size: int) -> list[list[T]]:
    """Split values into consecutive lists of ``size``; the last may be shorter."""
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def kl_schedule(settings: TrustRegionSettings, strategy: str, warmup: float) -> KLScheduleSettings:
    """Return the schedule of the KL coefficient, with a warm-up in updates; constant 0 without a trust region."""
    if strategy == "none":
        return KLScheduleSettings(schedule="constant", minimum=0.0, maximum=0.0)
    return KLScheduleSettings(
        schedule=settings.kl_schedule,
        feedback=settings.kl_feedback,
        initial=settings.kl_coef,
        minimum=settings.kl_min_coef,
        maximum=settings.kl_weight,
        warmup_updates=warmup,
        window=settings.kl_window,
        gain=settings.kl_gain,
        target=settings.kl_weight if settings.kl_target is None else settings.kl_target,
    )
