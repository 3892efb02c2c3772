"""Policy update: accumulated gradients of an objective's loss terms, optimizer step, KL
coefficient, anchor.

The rollouts of an iteration are trained in one or several updates. Every update accumulates
gradients over all its rollouts and what is trained of each. Gathering sharded weights is a
collective, so all ranks make the same number of passes; replicas with fewer rollouts make empty
passes.
"""

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyvideo.distributed.collectives import (
    average_gradients,
    clip_gradients,
    gather_ranks,
    gather_replicas,
    sum_over_replicas,
)
from hyvideo.loss.metrics import UpdateResult, average, sums_by_step
from hyvideo.loss.trust_region import KLCoefficient, KLScheduleSettings
from hyvideo.settings.config import Config
from hyvideo.settings.objectives.base import KLCoefficientSettings
from hyvideo.training.ledger import Ledger
from hyvideo.training.nonfinite_updates import NonFiniteUpdates
from hyvideo.training.objective import Objective, Terms
from hyvideo.training.optimizers import learning_rate
from hyvideo.training.reward_gradient import RewardTerm
from hyvideo.training.rollout_batch import Pass, RolloutBatch, chunks, forbid_changes


class PlannedUpdate(NamedTuple):
    """One update of an iteration, on this replica."""

    passes: list[Pass]
    num_rollouts: int  # over all replicas
    has_signal: bool  # whether an advantage is not 0, if the objective needs one


class UpdateWork(NamedTuple):
    """Inputs of one optimizer update."""

    rollouts: RolloutBatch
    reference: Any  # from `Objective.prepare`
    passes: list[Pass]
    num_terms: int  # (rollout, trained step) pairs over all replicas
    iteration: int
    is_fresh: bool  # whether the policy is still the rollout policy


class Accumulated(NamedTuple):
    """Sums and values of the passes of an update on this rank."""

    sums: Tensor  # (2 + metrics,), float64: the loss, the KL, and each metric of the objective
    deviations: Tensor  # (passes,), largest deviation of each pass
    # (values + 1, terms): the values that are reported by step, the KL, and the deviation
    by_term: Tensor


class PolicyUpdate:
    """Trains the policy on the rollouts of an iteration."""

    def __init__(self, objective: Objective, reward_term: RewardTerm | None = None):
        self.objective = objective
        self.reward_term = reward_term
        self.metrics = objective.metrics  # names of the metrics of a pass
        if reward_term:
            self.metrics = (*objective.metrics, *reward_term.metrics)
        self.config = objective.config
        self.mesh = objective.mesh
        self.policy = objective.policy
        self.device = objective.pipeline.device
        self.progress = objective.progress
        self.cost = objective.cost
        self.num_updates = self.config.objective.updates
        self.kl_coefficient = KLCoefficient(kl_schedule(self.config))
        self.update_count = 0
        # optimizer steps of this process, also one that failed; it may have changed some weights
        self.steps_begun = 0
        self.nonfinite = NonFiniteUpdates(
            self.mesh, max_bad_updates=self.config.optimizer.max_bad_updates
        )
        self.ledger = Ledger(
            self.config.record.record,
            self.mesh,
            group_size=self.config.rollout.num_generations,
            boundary=self.config.sampling.boundary,
        )
        self._has_moved = False  # whether the last update had a nonzero gradient and learning rate

    def __call__(
        self, rollouts: RolloutBatch, reference: Any, iteration: int
    ) -> dict[str, float | list]:
        """Run the updates of an iteration and return their metrics, averaged over the trained
        terms.

        ``reference`` is the result of `Objective.prepare`.
        """
        if self.reward_term:
            self.reward_term.begin()
        results: list[UpdateResult | None] = []
        without_signal = without_reward = 0
        for planned in self._planned_updates(rollouts):
            if not planned.has_signal:
                if not self._kl_has_signal(has_moved=any(result is not None for result in results)):
                    without_signal += 1
                    continue
                without_reward += 1
            work = UpdateWork(
                rollouts=rollouts,
                reference=reference,
                passes=planned.passes,
                num_terms=planned.num_rollouts * len(rollouts.all_columns),
                iteration=iteration,
                is_fresh=not results,
            )
            results.append(self._one_update(work))
        if self.policy.anchor:
            self.policy.anchor.after_iteration()
        if self.mesh.is_main:
            _print_without_signal(iteration, skipped=without_signal, with_kl_alone=without_reward)
        applied = [result for result in results if result is not None]
        metrics = average(
            applied,
            deviation_names=self.objective.deviation_names,
            by_step=self.objective.by_step,
        )
        return metrics | {
            "update/skipped": float(len(results) - len(applied)),
            "update/without_signal": float(without_signal),
        }

    def _planned_updates(self, rollouts: RolloutBatch) -> list[PlannedUpdate]:
        """Return the updates of an iteration, without those of which all rewards are missing.
        Collective.
        """
        # the reward has a gradient also where all rewards of a group are equal
        needs_signal = (
            self.objective.uses_advantages
            and not self.config.reward.ignore_rewards
            and not self.reward_term
        )
        has_advantage = (rollouts.advantages != 0).tolist()
        batches_of = []
        sizes = []
        for update in range(self.num_updates):
            rows = rollouts.rows_of_update(update, self.num_updates)
            batches_of.append(chunks(rows, self.config.rows_per_pass))
            sizes.append([len(rows), sum(has_advantage[row] for row in rows)])
        totals = sum_over_replicas(torch.tensor(sizes), self.mesh).tolist()
        lengths = torch.tensor([len(batches) for batches in batches_of])
        most = gather_replicas(lengths, self.mesh).amax(0).tolist()
        planned = []
        for batches, num_batches, (num_rollouts, num_signals) in zip(batches_of, most, totals):
            if num_rollouts == 0:
                continue
            # replicas with fewer rollouts make empty passes
            batches = batches + [[]] * (num_batches - len(batches))
            passes = [Pass(rows, column) for rows in batches for column in rollouts.all_columns]
            has_signal = num_signals > 0 or not needs_signal
            planned.append(PlannedUpdate(passes, num_rollouts, has_signal))
        return planned

    def _kl_has_signal(self, *, has_moved: bool) -> bool:
        """Return whether the KL terms have a gradient that is not only rounding; the same on all
        ranks.

        The KL to the anchor has none while the anchor equals the policy, and the KL to the rollout
        policy has none before the first update of an iteration: ``has_moved`` says whether the
        policy has left the rollout policy.
        """
        anchor, weights = self.policy.anchor, self.config.objective.kl_weights
        is_pulled = weights.position != 0 and anchor is not None and not anchor.equals_policy
        return self.kl_coefficient.value > 0 and (
            is_pulled or (weights.velocity != 0 and has_moved)
        )

    def _one_update(self, work: UpdateWork) -> UpdateResult | None:
        """Run one optimizer update and return its metrics; None if it was skipped because of NaN or
        inf.
        """
        found = self._accumulate(work)
        # with one update, the iteration ends right after the step
        if work.is_fresh and self.num_updates > 1:
            self.progress.check()
        coefficient = self.kl_coefficient.value
        lr = learning_rate(self.config.optimizer, self.update_count)
        # Copied to the CPU before the optimizer step, because a later copy would wait for it.
        means = sum_over_replicas(found.sums, self.mesh).cpu() / work.num_terms
        own = torch.stack([found.deviations.amax().double(), found.sums[0]])
        deviations, losses = gather_ranks(own, self.mesh).cpu().unbind(1)
        by_step = self._by_step(work, found.by_term.cpu()) if self.objective.by_step else None
        deviation = deviations.amax().item()
        if self._has_moved:
            self.objective.check_moved(deviation, work.iteration, is_fresh=work.is_fresh)
        grad_norm = self._step(lr, losses, work.iteration)
        self.ledger.add_update(
            work.rollouts,
            sorted({row for each in work.passes for row in each.rows}),
            {
                "update": self.update_count,
                "lr": lr,
                "kl": means[1].item(),
                "kl_coef": coefficient,
                "grad_norm": grad_norm,
                "num_terms": work.num_terms,
            },
        )
        self._has_moved = grad_norm is not None and grad_norm * lr > 0
        if grad_norm is None:
            return None
        _, kl, *values = means.tolist()
        metrics = dict(zip(self.metrics, values, strict=True))
        metrics["kl/coef"] = coefficient
        metrics["lr"] = lr
        metrics[self.objective.deviation_names[0]] = deviation
        metrics["grad/norm"] = grad_norm
        metrics["grad/spike"] = self.nonfinite.spike(grad_norm)
        if self.policy.anchor is None:  # these are not measured
            metrics |= {
                name: math.nan
                for name in ("kl/position", "policy/velocity_norm")
                if name in metrics
            }
        if math.isfinite(kl):  # it may only be a diagnosis
            self.kl_coefficient.observe(kl)
        self.policy.after_update()
        return UpdateResult(metrics, work.num_terms, by_step)

    def _accumulate(self, work: UpdateWork) -> Accumulated:
        """Accumulate the gradients of all passes and return the sums of their terms.

        Every replica divides by ``num_terms``, the number over all replicas, so that each term has
        the same weight in any layout. Gradients are later averaged over the replicas; the factor
        ``num_replicas`` turns that into a sum.
        """
        objective, passes = self.objective, work.passes
        sums = torch.zeros(2 + len(self.metrics), dtype=torch.float64, device=self.device)
        losses: list[Tensor] = []
        deviations: list[Tensor] = []
        by_term = [sums.new_empty(len(objective.by_step) + 2, 0)]
        needs_check = work.is_fresh and self._is_check_due(work.iteration)
        for number, (rows, column) in enumerate(passes):
            self.progress.enter(
                "update", f"pass {number + 1}/{len(passes)} of update {self.update_count + 1}"
            )
            if work.is_fresh:
                self.progress.check()
            self.policy.before_backward(is_last=number == len(passes) - 1)
            if rows:
                terms = self._terms(work, rows, column)
                self.ledger.add_pass(work.rollouts, rows, column, terms)
                loss = terms.loss.sum()
                (loss * self.mesh.num_replicas / work.num_terms).backward()
                kl, deviation = terms.kl.detach(), terms.deviation.detach()
                values = [terms.loss.detach(), kl]
                values += [terms.metrics[name].detach() for name in self.metrics]
                sums += torch.stack([value.double().sum() for value in values])
                losses.append(loss.detach())
                deviations.append(deviation.amax())
                reported = [terms.metrics[name].detach() for name in objective.by_step]
                by_term.append(torch.stack([*reported, kl, deviation]))
            else:
                if self.policy.is_sharded:  # joins the collectives of the other ranks
                    (objective.empty_pass(work.rollouts, column).sum() * 0.0).backward()
                losses.append(sums.new_zeros((), dtype=torch.float32))
                deviations.append(sums.new_zeros((), dtype=torch.float32))
            # early, and again before the weights change
            if needs_check and number in (0, len(passes) - 1):
                self._check_fresh(work, losses, deviations)
        num_forwards = sum(objective.num_forwards(work.rollouts, *a_pass) for a_pass in passes)
        self.cost.add(num_forwards, kind="training")
        return Accumulated(sums, torch.stack(deviations), torch.cat(by_term, dim=1))

    def _terms(self, work: UpdateWork, rows: list[int], column: int) -> Terms:
        """Return the loss terms of a pass."""
        with forbid_changes(work.rollouts, self.objective.name):
            terms = (self.reward_term or self.objective).terms(
                work.rollouts,
                work.reference,
                rows,
                column,
                kl_coefficient=self.kl_coefficient.value,
            )
        each = (terms.loss, terms.kl, terms.deviation, *terms.metrics.values())
        assert all(value.shape == (len(rows),) for value in each), (
            "`terms` of an objective must return one number per row"
        )
        return terms

    def _check_fresh(
        self, work: UpdateWork, losses: list[Tensor], deviations: list[Tensor]
    ) -> None:
        """Check the first passes of an iteration, on all ranks together."""
        own = [each for each in work.passes if each.column != work.rollouts.reward_column]
        self.objective.check_fresh(
            work.rollouts, work.reference, own, losses, deviations, work.iteration
        )
        if self.reward_term:
            self.reward_term.check_fresh(work.iteration)

    def _is_check_due(self, iteration: int) -> bool:
        """Return whether the first update is checked: in the first iteration, and every
        ``gate_interval``.
        """
        interval = self.config.objective.gate_interval
        return interval > 0 and (iteration - 1) % interval == 0

    def _by_step(self, work: UpdateWork, by_term: Tensor) -> Tensor:
        """Return `sums_by_step` over all replicas. Shape: (2 + values, steps)."""
        steps = torch.cat(
            [work.rollouts.trained_steps[rows, column] for rows, column in work.passes]
        )
        local = sums_by_step(
            by_term[:-1], by_term[-1], steps, len(work.rollouts.schedule.transitions)
        )
        gathered = gather_replicas(local, self.mesh)  # (replicas, 2 + values, steps)
        return torch.cat([gathered[:, :-1].sum(0), gathered[:, -1:].amax(0)])

    def _step(self, lr: float, losses: Tensor, iteration: int) -> float | None:
        """Average, clip and apply the gradients; return the norm before clipping, or None if the
        gradient or a rank's loss, shape (ranks,), is NaN or inf.

        Other values of the objective may be NaN: they only describe the update.
        """
        average_gradients(self.policy.parameters, self.mesh, is_sharded=self.policy.is_sharded)
        grad_norm = clip_gradients(self.policy.parameters, self.config.optimizer.max_grad_norm)
        ranks = (~losses.isfinite()).nonzero().flatten().tolist()
        if ranks or not math.isfinite(grad_norm):
            self.policy.optimizers.zero_grad()
            self.nonfinite.record_skipped(ranks=ranks, iteration=iteration)
            return None
        self.nonfinite.record_finite()
        self.steps_begun += 1
        self.policy.optimizers.step(lr)
        self.update_count += 1
        return grad_norm


def _print_without_signal(iteration: int, *, skipped: int, with_kl_alone: int) -> None:
    """Print how many updates had no reward to learn from: Adam and Muon would turn rounding into
    full steps.
    """
    reason = (
        "because the rewards of each group are equal; see advantage/zero_groups in "
        "docs/monitoring.md#troubleshooting"
    )
    if skipped:
        print(
            f"\niteration {iteration}: number of updates skipped: {skipped}, {reason}",
            file=sys.stderr,
            flush=True,
        )
    if with_kl_alone:
        count = f"number of updates that train the KL alone: {with_kl_alone}"
        print(f"\niteration {iteration}: {count}, {reason}", file=sys.stderr, flush=True)


def kl_schedule(config: Config) -> KLScheduleSettings:
    """Return the schedule of the KL coefficient, with a warm-up in updates; constant 0 without a
    trust region.
    """
    settings = config.objective
    if not isinstance(settings, KLCoefficientSettings) or settings.strategy == "none":
        return KLScheduleSettings(schedule="constant", minimum=0.0, maximum=0.0)
    return KLScheduleSettings(
        schedule=settings.kl_schedule,
        minimum=settings.kl_coef,
        maximum=settings.kl_weight,
        warmup_updates=config.kl_warmup,
        target=settings.kl_weight if settings.kl_target is None else settings.kl_target,
    )
