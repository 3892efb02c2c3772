"""Stored rollouts to optimizer updates: anchor's means, the clipped loss in its trust region, gradients, one step.

The rollouts of an iteration are trained in one update or several. Every update accumulates gradients over all its
rollouts and trained steps; all ranks make the same number of passes, with empty ones where a replica has fewer
rollouts, since sharded weights are gathered by all together.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
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
from hyvideo.grpo.trust_region import KLCoefficient, KLScheduleSettings, kl_weights
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.training.nonfinite_updates import NonFiniteUpdates
from hyvideo.training.on_policy_check import OnPolicyCheck
from hyvideo.training.optimizers import learning_rate
from hyvideo.training.policy import Policy
from hyvideo.training.rollout_batch import RolloutBatch, select
from hyvideo.training.rollout_collector import Cost

T = TypeVar("T")


class Pass(NamedTuple):
    """Rows of one training forward and backward, each at the ``turn``-th of its trained steps."""

    rows: list[int]  # empty where this replica has fewer rollouts than others
    turn: int


class UpdateWork(NamedTuple):
    """Work of one optimizer update on the rollouts of an iteration."""

    rollouts: RolloutBatch
    passes: list[Pass]
    num_terms: int  # of all replicas together
    anchor_means: Tensor | None  # as of `PolicyUpdate.anchor_means`
    iteration: int
    is_fresh: bool  # the policy still is the one that made the rollouts


class PolicyUpdate:
    """Trains the policy on the rollouts of an iteration."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pipeline: GRPOPipeline,
        policy: Policy,
        *,
        num_updates: int,  # optimizer updates of an iteration
        cost: Cost,  # counts the transformer evaluations
        on_stage: Callable[..., None] = lambda *stage: None,  # hears ``anchor`` or ``update``, and each pass
        check: Callable[[], None] = lambda: None,  # on every rank until the first step; raises where the run shall stop
    ):
        self.config, self.mesh, self.pipeline, self.policy = config, mesh, pipeline, policy
        self.num_updates, self.cost, self.on_stage, self.check = num_updates, cost, on_stage, check
        settings = config.trust_region
        self.kl_weights = kl_weights(
            config.kl_strategy, dual_position=settings.dual_kl_moving_weight, dual_velocity=settings.dual_kl_step_weight
        )
        self._is_gaussian = config.measures_velocity and settings.kl_velocity == "gaussian"
        self.kl_coefficient = KLCoefficient(kl_schedule(settings, config.kl_strategy))
        self.update_count = 0
        self.nonfinite = NonFiniteUpdates(
            Path(config.record.output_dir), mesh, max_bad_updates=config.optimizer.max_bad_updates
        )
        self.on_policy_check = OnPolicyCheck(
            mesh, pipeline, config.loss, dtype=config.model.dtype, batch_size=config.rollout.batch_size
        )
        self.refresh_step_weights()

    def refresh_step_weights(self) -> None:
        """Takes the weights of the steps from the scheduler, whose stochastic steps a window may have changed."""
        rollout = self.config.rollout
        balancing = self.pipeline.scheduler.compute_grad_balancing_factors(eta=rollout.eta, sde_type=rollout.sde_type)
        weights = balancing if self.config.loss.use_grad_balancing else (balancing > 0).float()
        self.step_weights = weights.to(self.pipeline.device)

    def reads_means(self) -> bool:
        """Claims that the next updates read the means of the rollouts' transitions: beside them the anchor, while it
        still is the policy, and the closed form of the velocity distance."""
        anchor = self.policy.anchor
        return self._is_gaussian or (anchor is not None and anchor.equals_policy)

    def anchor_means(self, rollouts: RolloutBatch) -> Tensor | None:
        """The anchor's means at the trained transitions, or None where they are not needed or not needed yet.

        An anchor that equals the rollout policy has the rollout's means: no forward is made for them.
        Shape: (rollouts, ``anchor_turns``, channels, frames, height, width), or of all turns where they cost nothing.
        """
        anchor = self.policy.anchor
        if anchor is None:
            return None
        if anchor.equals_policy:
            return rollouts.trajectories.means
        if self.config.trust_region.kl_compute_mode == "training_phase":
            return None
        with anchor.in_place():
            return self._means(rollouts, rollouts.anchor_turns)

    def _means(self, rollouts: RolloutBatch, turns: Sequence[int]) -> Tensor:
        """Means at these turns under the weights in place. Shape: (rollouts, turns, channels, ...)."""
        latents = rollouts.trajectories.latents
        means = latents.new_empty(len(rollouts), len(turns), *latents.shape[2:])
        passes = list(product(chunks(range(len(rollouts)), self.config.rows_per_pass), enumerate(turns)))
        for number, (rows, (place, turn)) in enumerate(passes, 1):
            self.on_stage("anchor", f"pass {number}/{len(passes)}")
            self.check()
            means[rows[0] : rows[-1] + 1, place] = self._mean(rollouts, Pass(rows, turn))
        return means

    def __call__(self, rollouts: RolloutBatch, anchor_means: Tensor | None, iteration: int) -> dict[str, float | list]:
        """Makes the iteration's updates; gives their metrics, averaged over the terms that they trained on."""
        self.refresh_step_weights()
        rows_of = [rollouts.rows_of_update(update, self.num_updates, iteration) for update in range(self.num_updates)]
        num_rollouts = sum_over_replicas(torch.tensor([len(rows) for rows in rows_of]), self.mesh).tolist()
        batches_of = [chunks(rows, self.config.rows_per_pass) for rows in rows_of]
        most = gather_replicas(torch.tensor([len(batches) for batches in batches_of]), self.mesh).amax(0).tolist()
        results: list[UpdateResult | None] = []
        for batches, num_batches, count in zip(batches_of, most, num_rollouts):
            if count == 0:  # every reward of its groups is missing, on all ranks
                continue
            batches = batches + [[]] * (num_batches - len(batches))
            passes = [Pass(rows, turn) for rows in batches for turn in rollouts.turns]
            num_terms = count * len(rollouts.turns)
            work = UpdateWork(rollouts, passes, num_terms, anchor_means, iteration, is_fresh=not results)
            results.append(self._one_update(work))
        if self.policy.anchor:
            self.policy.anchor.after_iteration()
        applied = [result for result in results if result is not None]
        return average(applied) | {"update/skipped": float(len(results) - len(applied))}

    def _one_update(self, work: UpdateWork) -> UpdateResult | None:
        """Makes one optimizer update; gives its metrics, None where it was skipped for numbers that are not finite."""
        sums, deviations, each = self._accumulate(work)
        if work.is_fresh and self.num_updates > 1:  # a round of one update is done with the step
            self.check()
        used = {"kl/coef": self.kl_coefficient.value, "lr": learning_rate(self.config.optimizer, self.update_count)}
        # On the CPU before the step is made: read later they would wait for it.
        sums = sum_over_replicas(sums, self.mesh).cpu() / work.num_terms
        largest = gather_ranks(deviations.amax(), self.mesh).cpu()
        by_step = self._by_step(work, each.cpu())
        grad_norm = self._step(used["lr"], sums, largest, work)
        if grad_norm is None:
            return None
        metrics = dict(zip(LossTerms.SUMMED, sums.tolist())) | used
        metrics |= {
            "policy/ratio_max_deviation": largest.amax().item(),
            "grad/norm": grad_norm,
            "grad/spike": self.nonfinite.spike(grad_norm, work.iteration),
        }
        if self.policy.anchor is None:
            metrics["kl/position"] = math.nan  # not measured
        self.kl_coefficient.observe(metrics.pop("kl/total"))
        self.policy.after_update()
        return UpdateResult(metrics, work.num_terms, by_step)

    def _accumulate(self, work: UpdateWork) -> tuple[Tensor, Tensor, Tensor]:
        """Adds up the gradients of all passes; gives the sums of the terms, each pass's largest ratio deviation, and
        ratio and KL of each term, (2, terms).

        Every replica divides by ``num_terms``, the number of all replicas together, so that each term weighs the same
        however the rollouts are dealt. In the end gradients are averaged over the replicas: the factor
        ``num_replicas`` turns that mean back into the sum that the division needs.
        """
        sums = torch.zeros(len(LossTerms.SUMMED), dtype=torch.float64, device=self.pipeline.device)
        deviations: list[Tensor] = []
        pairs = [sums.new_empty(2, 0)]
        rollouts, passes = work.rollouts, work.passes
        is_checked = work.is_fresh and self.on_policy_check.is_due(work.iteration)
        turns = self._anchor_turns(rollouts, work.anchor_means)
        for number, (rows, turn) in enumerate(passes):
            self.on_stage("update", f"pass {number + 1}/{len(passes)} of update {self.update_count + 1}")
            if work.is_fresh:
                self.check()
            anchor_mean = self._anchor_mean(rollouts, Pass(rows, turn), work.anchor_means) if turn in turns else None
            self.policy.gradient_sync.before_backward(is_last=number == len(passes) - 1)
            if rows:
                terms = self.terms(rollouts, rows, turn, anchor_mean, len(rollouts.turns) / len(turns))
                (terms.loss.sum() * self.mesh.num_replicas / work.num_terms).backward()
                sums += terms.sums()
                deviations.append(terms.largest_deviation())
                pairs.append(torch.stack([terms.ratio, terms.kl.detach()]))
            else:
                if self.policy.is_sharded:  # beside ranks whose passes add something: sharded ones are made together
                    (self._velocity_of_nothing(rollouts, turn).sum() * 0.0).backward()
                deviations.append(sums.new_zeros((), dtype=torch.float32))
            if is_checked and number in (0, len(passes) - 1):  # soon, and before anything is changed
                self._check_fresh(work, deviations)
        num_forwards = sum(self.pipeline.num_forwards(self._timesteps(rollouts, *a_pass)) for a_pass in passes)
        self.cost.forwards += num_forwards * self.cost.of_training
        return sums, torch.stack(deviations), torch.cat(pairs, dim=1)

    def _by_step(self, work: UpdateWork, pairs: Tensor) -> Tensor | None:
        """Sums and largest deviations of all replicas by denoising step; None for the noise levels of nft."""
        trained_steps = work.rollouts.trained_steps
        if trained_steps.is_floating_point():
            return None
        steps = torch.cat([trained_steps[rows, turn] for rows, turn in work.passes])
        mine = sums_by_step(*pairs, steps, len(self.pipeline.scheduler.timesteps))
        every = gather_replicas(mine, self.mesh)  # (replicas, 4, steps)
        return torch.cat([every[:, :3].sum(0), every[:, 3:].amax(0)])

    def _check_fresh(self, work: UpdateWork, deviations: list[Tensor]) -> None:
        self.on_policy_check(work.rollouts, work.passes, deviations, work.iteration)

    def terms(
        self, rollouts: RolloutBatch, rows: list[int], turn: int, anchor_mean: Tensor | None, anchor_weight: float = 1.0
    ) -> LossTerms:
        """Terms of the loss of one training forward: each row at the ``turn``-th of its trained steps."""
        steps = rollouts.trained_steps[rows, turn]
        step = rollouts.replay(self.pipeline, rows, steps)
        inputs = LossInputs(
            log_prob=step.log_prob,
            mean=step.prev_sample_mean,
            std=step.std_dev_t,
            old_log_prob=select(rollouts.trajectories.log_probs, rows, steps),
            advantages=select(rollouts.advantages, rows),
            step_weights=select(self.step_weights, steps),
            anchor_mean=anchor_mean,
            anchor_weight=anchor_weight,
            rollout_mean=select(rollouts.trajectories.means[:, turn], rows) if self._is_gaussian else None,
        )
        return grpo_terms(
            inputs,
            clip_range=self.config.loss.clip_range,
            kl_weights=self.kl_weights,
            kl_coefficient=self.kl_coefficient.value,
        )

    def _step(self, rate: float, sums: Tensor, deviations: Tensor, work: UpdateWork) -> float | None:
        """Averages, clips and applies the gradients; gives their norm before, None if not finite on some rank."""
        average_gradients(self.policy.parameters, self.mesh, is_sharded=self.policy.is_sharded)
        grad_norm = clip_gradients(self.policy.parameters, self.config.optimizer.max_grad_norm)
        if math.isfinite(grad_norm) and sums.isfinite().all():
            self.nonfinite.good()
            self.policy.optimizers.step(rate)
            self.update_count += 1
            return grad_norm
        self.policy.optimizers.drop_gradients()
        ranks = (~deviations.isfinite()).nonzero().flatten().tolist()
        self.nonfinite.bad(work.rollouts, ranks=ranks, iteration=work.iteration)
        return None

    def _anchor_turns(self, rollouts: RolloutBatch, means: Tensor | None) -> Sequence[int]:
        """Turns at which the distance to the anchor is measured: the drawn ones, or all where ``means`` has all."""
        has_all = means is not None and means.shape[1] == len(rollouts.turns)
        return rollouts.turns if has_all else rollouts.anchor_turns

    def _anchor_mean(self, rollouts: RolloutBatch, a_pass: Pass, means: Tensor | None) -> Tensor | None:
        """The anchor's means of a pass: made before, made now, or not needed."""
        if means is not None or self.policy.anchor is None or self.policy.anchor.equals_policy:
            if means is None or not a_pass.rows:
                return None
            return select(means[:, self._anchor_turns(rollouts, means).index(a_pass.turn)], a_pass.rows)
        with self.policy.anchor.in_place():
            if a_pass.rows:
                return self._mean(rollouts, a_pass)
            if self.policy.is_sharded:
                with torch.no_grad():
                    self._velocity_of_nothing(rollouts, a_pass.turn)
        return None

    @torch.no_grad()
    def _mean(self, rollouts: RolloutBatch, a_pass: Pass) -> Tensor:
        """Means of a pass under the weights in place. Shape: (rows, channels, frames, height, width)."""
        rows, turn = a_pass
        self.cost.forwards += self.pipeline.num_forwards(self._timesteps(rollouts, *a_pass))
        return rollouts.replay(self.pipeline, rows, rollouts.trained_steps[rows, turn]).prev_sample_mean

    def _timesteps(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> Tensor:
        """Timesteps that the rows of a pass are at. On the CPU. Shape: (rows,)."""
        return self.pipeline.scheduler.timesteps[rollouts.trained_steps[rows, turn]]

    def _velocity_of_nothing(self, rollouts: RolloutBatch, turn: int) -> Tensor:
        """Velocity of zeros, in the branches of that turn: what a rollout without a reward holds may not be finite."""
        nothing = torch.zeros_like(rollouts.trajectories.latents[:1, 0])
        return self.pipeline.velocity(nothing, self._timesteps(rollouts, [0], turn), rollouts.conditions.select([0]))


def chunks(values: Sequence[T], size: int) -> list[list[T]]:
    """Lists of ``size`` neighbours; the last may be shorter."""
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def kl_schedule(settings: TrustRegionSettings, strategy: str) -> KLScheduleSettings:
    """Rule of the coefficient, by the settings; 0 without a trust region."""
    if strategy == "none":
        return KLScheduleSettings(schedule="constant", minimum=0.0, maximum=0.0)
    return KLScheduleSettings(
        schedule=settings.kl_schedule,
        feedback=settings.kl_feedback,
        initial=settings.kl_coef,
        minimum=settings.kl_min_coef,
        maximum=settings.kl_weight,
        warmup_updates=settings.kl_warmup_updates,
        window=settings.kl_window,
        gain=settings.kl_gain,
        target=settings.kl_weight if settings.kl_target is None else settings.kl_target,
    )
