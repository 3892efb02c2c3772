"""Stored rollouts to optimizer updates: anchor's means, the clipped loss in its trust region, gradients, one step.

A round is trained in one update or several. Every update accumulates gradients over all its rollouts and visited steps;
all ranks make the same number of passes, with empty ones where a replica has fewer rollouts, since sharded weights are
gathered by all together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.config.run_plan import make_plan, training_forwards
from hyvideo.config.settings import Config
from hyvideo.distributed.collectives import (
    average_gradients,
    clip_gradients,
    gather_ranks,
    gather_replicas,
    sum_over_replicas,
)
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.loss import clipped_policy_loss
from hyvideo.grpo.metrics import SUMMED, Terms, UpdateResult, average
from hyvideo.grpo.trust_region import KLCoefficient, KLScheduleSettings, kl_weights, position_kl, velocity_kl
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.training.nonfinite_updates import NonFiniteUpdates
from hyvideo.training.on_policy_check import OffPolicyError, Transitions, explain, tolerance_of
from hyvideo.training.optimizers import learning_rate
from hyvideo.training.policy import Policy
from hyvideo.training.rollout_batch import RolloutBatch


@dataclass
class Cost:
    """Transformer evaluations of this replica in this iteration."""

    forwards: float = 0.0


class PolicyUpdates:
    """Trains the policy on rounds of rollouts.

    Args:
        on_stage: Is told ``anchor`` or ``update`` before each of their passes.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        pipeline: HunyuanVideoGRPOPipeline,
        policy: Policy,
        on_stage: Callable[[str], None] = lambda stage: None,
    ):
        self.config, self.mesh, self.device, self.on_stage = config, mesh, device, on_stage
        self.pipeline, self.policy = pipeline, policy
        self.plan = make_plan(config, mesh.world_size)
        self.refresh_step_weights()
        settings = config.trust_region
        self.kl_weights = kl_weights(
            config.kl_strategy,
            dual_position=settings.dual_kl_moving_weight,
            dual_velocity=settings.dual_kl_step_weight,
        )
        self.kl_coefficient = KLCoefficient(kl_schedule(config))
        self.update_count = 0
        self.cost = Cost()
        self.health = NonFiniteUpdates(
            Path(config.record.output_dir), mesh, max_bad_updates=config.optimizer.max_bad_updates
        )
        self.branches = config.num_branches

    def refresh_step_weights(self) -> None:
        """Takes the weights of the steps from the scheduler, whose stochastic steps a window may have changed."""
        rollout = self.config.rollout
        sampler = {"eta": rollout.eta, "sde_type": rollout.sde_type}
        balancing = self.pipeline.scheduler.compute_grad_balancing_factors(**sampler)
        weights = balancing if self.config.loss.use_grad_balancing else (balancing > 0).float()
        self.step_weights = weights.to(self.device)

    # --- trust region ---------------------------------------------------------------------------------------------

    def anchor_means(self, round_: RolloutBatch) -> Tensor | None:
        """The anchor's means at the visited transitions, or None where they are not needed or not needed yet.

        An anchor that equals the rollout policy has the rollout's means: no forward is made for them.
        Shape: (rollouts, trained steps, channels, frames, height, width).
        """
        anchor = self.policy.anchor
        if anchor is None:
            return None
        index = torch.arange(len(round_.places))[:, None]
        if anchor.equals_policy:
            return round_.rollout.means[index, round_.visits]
        if self.config.trust_region.kl_compute_mode == "training_phase":
            return None
        means = torch.zeros_like(round_.rollout.means[index, round_.visits])
        with anchor.in_place():
            for rows in chunks(list(range(len(round_.places))), self.config.loss.mini_batch_size_per_update):
                for visit in range(round_.visits.shape[1]):
                    self.on_stage("anchor")
                    means[rows, visit] = self._mean(round_, rows, visit)
        return means

    @torch.no_grad()
    def _mean(self, round_: RolloutBatch, rows: list[int], visit: int) -> Tensor:
        self.cost.forwards += self.branches * len(rows)
        return self.replay(round_, rows, visit).prev_sample_mean

    # --- update -----------------------------------------------------------------------------------------------------

    def train(self, round_: RolloutBatch, anchor_means: Tensor | None, iteration: int) -> dict[str, float]:
        """The round's optimizer updates; gives their metrics, averaged over the terms they trained on."""
        num_updates = self.plan.updates
        rows_of = [round_.rows_of_update(update, num_updates, iteration) for update in range(num_updates)]
        rollouts = sum_over_replicas(torch.tensor([len(rows) for rows in rows_of]), self.mesh).tolist()
        size = self.config.loss.mini_batch_size_per_update
        passes = gather_replicas(torch.tensor([len(chunks(rows, size)) for rows in rows_of]), self.mesh).amax(0)
        results = []
        for rows, num_rollouts, num_passes in zip(rows_of, rollouts, passes.tolist()):
            if num_rollouts == 0:  # every reward of its groups is missing, on all ranks
                continue
            gated = not results and self._is_gated(iteration)
            batches = chunks(rows, size)
            batches += [[]] * (num_passes - len(batches))
            results.append(self._one_update(round_, batches, num_rollouts, anchor_means, iteration, gated=gated))
        if self.policy.anchor:
            self.policy.anchor.after_round()
        skipped = sum(result is None for result in results)
        return average([result for result in results if result is not None]) | {"update/skipped": float(skipped)}

    def _one_update(
        self,
        round_: RolloutBatch,
        batches: list[list[int]],
        num_rollouts: int,
        anchor_means: Tensor | None,
        iteration: int,
        *,
        gated: bool,
    ) -> UpdateResult | None:
        """Gradients accumulated over all rollouts and visited steps, then one step of the optimizer.

        None where it was skipped.
        """
        num_visits = round_.visits.shape[1]
        num_terms = num_rollouts * num_visits
        sums = torch.zeros(len(SUMMED), dtype=torch.float64, device=self.device)
        deviations: list[Tensor] = []  # the largest of each pass
        passes = [(rows, visit) for rows in batches for visit in range(num_visits)]
        for number, (rows, visit) in enumerate(passes):
            self.on_stage("update")
            anchor_mean = self._anchor_mean(round_, rows, visit, anchor_means)
            self.policy.gradient_sync.before_backward(is_last=number == len(passes) - 1)
            if rows:
                terms = self.terms(round_, rows, visit, anchor_mean)
                # Gradients are averaged over the replicas, terms are not: hence the factor.
                (terms.loss.sum() * self.mesh.num_replicas / num_terms).backward()
                sums += terms.sums
                deviations.append(terms.largest_deviation)
            else:
                self._empty_pass(round_)
                deviations.append(sums.new_zeros((), dtype=torch.float32))
            if gated and number in (0, len(passes) - 1):  # soon, and before anything is changed
                self._pass_gate(round_, passes, deviations, iteration)
        forwards = training_forwards(self.config.distributed)
        self.cost.forwards += sum(map(len, batches)) * num_visits * self.branches * forwards

        used = {"kl/coef": self.kl_coefficient.value, "lr": learning_rate(self.config.optimizer, self.update_count)}
        sums = sum_over_replicas(sums, self.mesh) / num_terms
        largest = gather_ranks(torch.stack(deviations).amax(), self.mesh)
        grad_norm = self._step_optimizer(used["lr"], sums, largest, round_, iteration)
        if grad_norm is None:
            return None
        largest = largest.amax()
        metrics = (
            dict(zip(SUMMED, sums.tolist()))
            | used
            | {
                "policy/ratio_max_deviation": largest.item(),
                "grad/norm": grad_norm,
                "grad/spike": self.health.spike(grad_norm),
            }
        )
        if self.policy.anchor is None:
            metrics["kl/position"] = math.nan  # not measured
        self.kl_coefficient.observe(metrics.pop("kl/total"))
        self.policy.after_update()
        return UpdateResult(metrics, num_terms)

    def _anchor_mean(self, round_: RolloutBatch, rows: list[int], visit: int, means: Tensor | None) -> Tensor | None:
        """Of the rows at their visit: made before, made now, or not needed."""
        if means is not None or self.policy.anchor is None:
            return None if means is None else _at(means[:, visit], rows)
        with self.policy.anchor.in_place():
            if rows:
                return self._mean(round_, rows, visit)
            if self.policy.is_sharded:
                with torch.no_grad():
                    self._velocity_of_nothing(round_)
        return None

    def terms(self, round_: RolloutBatch, rows: list[int], visit: int, anchor_mean: Tensor | None) -> Terms:
        """Loss and metrics of one training forward: each row at the step of its ``visit``-th visit."""
        steps = round_.visits[rows, visit]
        step = self.replay(round_, rows, visit)
        old_log_prob = _at(round_.rollout.log_probs, rows, steps)
        policy = clipped_policy_loss(
            step.log_prob,
            old_log_prob,
            _at(round_.advantages, rows),
            _at(self.step_weights, steps),
            clip_range=self.config.loss.clip_range,
        )
        velocity = velocity_kl(step.log_prob, old_log_prob)
        if self.config.trust_region.kl_velocity == "gaussian":
            velocity = position_kl(step.prev_sample_mean, _at(round_.rollout.means, rows, steps), step.std_dev_t)
        position = torch.zeros_like(velocity)
        if anchor_mean is not None:
            position = position_kl(step.prev_sample_mean, anchor_mean, step.std_dev_t)
        kl = self.kl_weights.position * position + self.kl_weights.velocity * velocity
        loss = policy.terms + self.kl_coefficient.value * kl
        summed = (
            policy.terms,
            loss,
            position,
            velocity,
            kl,
            policy.ratio,
            policy.is_clipped,
            step.log_prob,
        )
        sums = torch.stack([term.detach().double().sum() for term in summed])
        return Terms(loss, sums, (policy.ratio - 1).abs().amax())

    def replay(self, round_: RolloutBatch, rows: list[int], visit: int):
        """The visited transition of each row, under the model as it is now."""
        return self._replay_at(round_, rows, round_.visits[rows, visit])

    def _replay_at(self, round_: RolloutBatch, rows: list[int], steps: Tensor):
        latents = round_.rollout.latents
        return self.pipeline.replay(
            _at(latents, rows, steps),
            _at(latents, rows, steps + 1),
            self.pipeline.scheduler.timesteps[steps],
            round_.conditions.select(rows),
        )

    def _is_gated(self, iteration: int) -> bool:
        interval = self.config.loss.gate_interval
        return interval > 0 and iteration % interval == 0

    def _pass_gate(
        self, round_: RolloutBatch, passes: list[tuple[list[int], int]], deviations: list[Tensor], iteration: int
    ) -> None:
        """Raises OffPolicyError, on all ranks alike, where passes over fresh rollouts are off their policy on any."""
        tolerance = tolerance_of(self.config)
        own = torch.stack(deviations)
        everyone = gather_ranks(own.amax(), self.mesh)
        if not (everyone > tolerance).any():
            return
        worst = int(everyone.argmax())
        rows, visit = passes[int(own.argmax())]
        rows = self._worst_last(round_, rows or [0], visit)
        steps = round_.visits[rows, visit]
        transitions = Transitions(
            replay=lambda: self.replay(round_, rows, visit).log_prob,
            replay_as_rollout=lambda: self._replay_as_rollout(round_, rows[-1], int(steps[-1])),
            log_probs=round_.rollout.log_probs[rows, steps],
        )
        told = explain(transitions, self.pipeline, tolerance=tolerance, rank=self.mesh.rank, iteration=iteration)
        raise OffPolicyError(told if worst == self.mesh.rank else f"rank {worst} says why the run stops; here: {told}")

    def _worst_last(self, round_: RolloutBatch, rows: list[int], visit: int) -> list[int]:
        """The rows, that with the largest deviation in the end."""
        with torch.no_grad():
            found = (
                self.replay(round_, rows, visit).log_prob - round_.rollout.log_probs[rows, round_.visits[rows, visit]]
            )
        worst = rows[int(found.abs().argmax())]
        return [row for row in rows if row != worst] + [worst]

    def _replay_as_rollout(self, round_: RolloutBatch, row: int, step: int) -> Tensor:
        """Log-probability of a row in the batch in which it was sampled. Shape: ()."""
        size = self.config.rollout.batch_size
        first = row // size * size
        batch = list(range(first, min(first + size, len(round_.places))))
        # That row last: it is the one whose way through the modules is compared.
        batch = [other for other in batch if other != row] + [row]
        with torch.no_grad():
            return self._replay_at(round_, batch, torch.full((len(batch),), step)).log_prob[-1]

    def _empty_pass(self, round_: RolloutBatch) -> None:
        """A forward and a backward pass that add nothing, beside ranks whose passes do, if they are made together."""
        if self.policy.is_sharded:
            (self._velocity_of_nothing(round_).sum() * 0.0).backward()

    def _velocity_of_nothing(self, round_: RolloutBatch) -> Tensor:
        """On zeros: what a rollout without a reward holds may not be finite."""
        nothing = torch.zeros_like(round_.rollout.latents[:1, 0])
        timestep = self.pipeline.scheduler.timesteps[round_.visits[0, :1]]
        return self.pipeline.velocity(nothing, timestep, round_.conditions.select([0]))

    def _step_optimizer(
        self, rate: float, sums: Tensor, deviations: Tensor, round_: RolloutBatch, iteration: int
    ) -> float | None:
        """Averages and clips the gradients and applies them; gives their norm before clipping.

        None where loss or gradient is not finite, on whatever rank: no rank then applies its own.
        """
        average_gradients(self.policy.parameters, self.mesh, is_sharded=self.policy.is_sharded)
        grad_norm = clip_gradients(self.policy.parameters, self.config.optimizer.max_grad_norm)
        if math.isfinite(grad_norm) and sums.isfinite().all():
            self.health.good()
            self.policy.optimizers.step(rate)
            self.update_count += 1
            return grad_norm
        self.policy.optimizers.drop_gradients()
        self.health.bad(round_, ranks=(~deviations.isfinite()).nonzero().flatten().tolist(), iteration=iteration)
        return None


def _at(values: Tensor, *indices: list[int] | Tensor) -> Tensor:
    """``values[indices]`` by indices on the CPU, without waiting for a GPU."""
    whole = (torch.as_tensor(index, dtype=torch.long) for index in indices)  # an empty list would be of floats
    return values[tuple(index.to(values.device, non_blocking=True) for index in whole)]


def chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def kl_schedule(config: Config) -> KLScheduleSettings:
    settings = config.trust_region
    if config.kl_strategy == "none":
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
