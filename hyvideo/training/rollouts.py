"""What an iteration trains on: rollouts of the policy with rewards.

A batch is scored in the background while the next one is sampled, or after all of them.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hyvideo.data.prompts import PromptOrder, Request
from hyvideo.data.randomness import generator
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.rewards.rewards import Reward
from hyvideo.rewards.scoring import Batch
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.settings.sections import RolloutSettings
from hyvideo.training.rewards import GroupRewards, PendingRewards
from hyvideo.training.rollout_batch import (
    RolloutBatch,
    RolloutIndex,
    chunks,
    forbid_changes,
    indices_of_replica,
    select,
)

if TYPE_CHECKING:
    from hyvideo.training.objective import Objective
    from hyvideo.training.run_setup import Run


class Collected(NamedTuple):
    """What `Objective.collect` returns: the data of an iteration on this replica."""

    rollouts: RolloutBatch  # with advantages
    reference: Any  # what the loss compares the policy with; from `Objective.prepare`
    metrics: dict[str, float]  # of the rewards


def rollouts_with_rewards(objective: "Objective", run: "Run", iteration: int) -> Collected:
    """Sample the rollouts of an iteration and score them. Collective.

    The last batch is scored beside the anchor's forward passes. With ``score_between_stages``, all
    are scored before them, while the GPU is otherwise idle.
    """
    rollouts, pending = run.source.collect(objective, iteration, is_scored=True)
    rewards: dict[int, Reward] = {}
    is_between = run.config.reward.score_between_stages
    if is_between:
        rewards = _wait(run, pending)
    reference = prepare(objective, run, rollouts)
    if not is_between:
        rewards = _wait(run, pending)
    advantages, metrics = run.rewards.advantages(rollouts.indices, rewards)
    rollouts = rollouts.with_rewards(rewards, advantages.to(run.pipeline.device))
    with run.progress.timed("record"):
        missing = metrics["reward/missing"]
        run.recorder.record(rollouts, pending.videos, iteration, num_missing=missing)
    run.rewards.check_failed_rewards(metrics, rewards, iteration)
    return Collected(rollouts, reference, metrics)


def without_rewards(objective: "Objective", run: "Run", iteration: int) -> Collected:
    """Return the rollouts or the given videos of an iteration, with advantages 0. Collective."""
    rollouts, _ = run.source.collect(objective, iteration, is_scored=False)
    reference = prepare(objective, run, rollouts)
    advantages = torch.zeros(len(rollouts), device=run.pipeline.device)
    return Collected(rollouts.with_rewards({}, advantages), reference, {})


def prepare(objective: "Objective", run: "Run", rollouts: RolloutBatch) -> Any:
    """Return `Objective.prepare`, usually the forward passes of the anchor (``time/anchor``)."""
    with run.progress.timed("anchor"), forbid_changes(rollouts, objective.name):
        return objective.prepare(rollouts)


def _wait(run: "Run", pending: PendingRewards) -> dict[int, Reward]:
    with run.progress.timed("reward", f"{run.inputs.plan.rollouts} videos"):
        rewards = run.rewards.wait(pending, run.progress.signals.all_ready)
    if run.pipeline.frozen:
        run.pipeline.frozen.come_back()
    return rewards


def replica_indices(settings: RolloutSettings, mesh: Mesh) -> list[RolloutIndex]:
    """Return the indices of this replica's rollouts in an iteration."""
    return [
        index
        for batch in range(settings.gradient_accumulation_steps)
        for index in indices_of_replica(settings, mesh, batch)
    ]


class Rollouts:
    """Samples the rollouts of an iteration on this replica."""

    def __init__(
        self,
        objective: "Objective",
        encoder: ConditionEncoder,
        rewards: GroupRewards,
        inputs: RunInputs,  # prompts, and the plan of an iteration
    ):
        self.config = objective.config
        self.mesh = objective.mesh
        self.pipeline = objective.pipeline
        self.progress = objective.progress
        self.cost = objective.cost
        self.noise = objective.noise
        self.encoder = encoder
        self.rewards = rewards
        self.requests = inputs.requests
        self.plan = inputs.plan
        self.schedule = self.config.sampling.schedule()  # regardless of an SDE window
        self.order = PromptOrder(len(self.requests), self.plan.groups, self.config.data.seed)
        self.window = parse_window(
            self.config.objective.window, len(self.schedule.stochastic_steps)
        )

    def collect(
        self, objective: "Objective", iteration: int, *, is_scored: bool
    ) -> tuple[RolloutBatch, PendingRewards]:
        """Sample an iteration; return its rollouts, without advantages, and this rank's videos and
        pending rewards, if ``is_scored``.
        """
        schedule = self.schedule_of(objective, iteration)
        indices = self.indices()
        requests = self.requests_of(iteration, indices)
        with self.progress.timed("conditions", f"{len(requests)} prompts"):
            conditions = self.encoder(requests, self.config.sampling.size)
            conditions = conditions.to(self.pipeline.device)
        self.cost.start()
        # With a guidance interval, all FSDP ranks must train the same step at the same time, to
        # make the same calls.
        is_guided = max(self.config.policy_cfg_scale, self.config.anchor_cfg_scale) > 1
        has_shared_order = self.config.rollout.guidance_interval and is_guided
        order_of = [RolloutIndex(0, 0)] * len(indices) if has_shared_order else indices
        count = self.plan.num_trained_steps
        trained = objective.draw(schedule, iteration, order_of, count)
        prompts = [request.prompt for request in requests]
        batches = self._batches(objective, iteration, schedule, indices, conditions, trained)
        trajectories, pending = self._score_each(batches, prompts, is_scored=is_scored)
        anchor_columns = []
        if count:
            anchor_columns = self.noise.anchor_columns(iteration, count, self.plan.num_anchor_steps)
        rollouts = RolloutBatch(
            indices=indices,
            prompts=prompts,
            conditions=conditions,
            trajectories=trajectories,
            schedule=schedule,
            trained_steps=trained,
            anchor_columns=anchor_columns,
            iteration=iteration,
        )
        return rollouts, pending

    def schedule_of(self, objective: "Objective", iteration: int) -> Schedule:
        """Return the schedule of an iteration, which adds noise only in its SDE window."""
        schedule = objective.schedule(self.schedule, iteration)
        if self.window is None:
            return schedule
        random = generator(self.config.data.seed, "sde window", iteration)
        steps = self.window.steps(
            schedule.stochastic_steps, iteration, lambda count: int(random.integers(count))
        )
        return schedule.with_noise_only_at(steps)

    def indices(self) -> list[RolloutIndex]:
        """Return the indices of this replica's rollouts in an iteration."""
        return replica_indices(self.config.rollout, self.mesh)

    def requests_of(self, iteration: int, indices: list[RolloutIndex]) -> list[Request]:
        prompts = self.order.indices(iteration)
        return [self.requests[prompts[index.group]] for index in indices]

    def sample(
        self,
        iteration: int,
        schedule: Schedule,
        indices: list[RolloutIndex],
        conditions: Conditions,
        *,
        mean_steps: Tensor | None = None,
        keeps_all: bool = True,
    ) -> Trajectories:
        """Sample a batch of rollouts, which does not affect their noise.

        ``mean_steps``: (rollouts, trained steps).
        """

        def stack(parts: list[Tensor]) -> Tensor:
            return to_device(torch.stack(parts), self.pipeline.device)

        return self.pipeline.sample(
            conditions,
            stack([self.noise.initial(iteration, index) for index in indices]),
            schedule,
            lambda step: stack([self.noise.for_step(iteration, index, step) for index in indices]),
            mean_steps=mean_steps,
            keeps_all=keeps_all,
        )

    def _batches(
        self,
        objective: "Objective",
        iteration: int,
        schedule: Schedule,
        indices: list[RolloutIndex],
        conditions: Conditions,
        trained: Tensor,
    ) -> Iterator[tuple[list[int], Trajectories]]:
        """Yield the rows and the trajectories of each batch."""
        batches = chunks(range(len(indices)), self.config.rollout.batch_size)
        for number, rows in enumerate(batches, 1):
            self.progress.check()
            with self.progress.timed("rollout", f"batch {number}/{len(batches)}"):
                trajectories = self.sample(
                    iteration,
                    schedule,
                    [indices[row] for row in rows],
                    conditions.select(rows),
                    mean_steps=trained[rows] if objective.needs_means else None,
                    keeps_all=objective.keeps_all_latents,
                )
                self.cost.add(len(rows) * self.pipeline.num_forwards(schedule.timesteps))
            yield rows, trajectories

    def _score_each(
        self,
        batches: Iterable[tuple[list[int], Trajectories]],
        prompts: list[str],
        *,
        is_scored: bool,
    ) -> tuple[Trajectories, PendingRewards]:
        """Decode batches and submit them for scoring, each at once, or all at the end
        (``score_between_stages``).
        """
        scorer, fps = self.rewards.scorer, self.config.data.fps
        parts: list[Trajectories] = []
        unscored: list[Batch] = []
        pending = PendingRewards()
        num_batches = math.ceil(len(prompts) / self.config.rollout.batch_size)
        for rows, trajectories in batches:
            parts.append(trajectories)
            share = self.mesh.rank_share(rows)
            if not share or not is_scored:
                continue
            with self.progress.timed("decode", f"batch {len(parts)}/{num_batches}"):
                latents = select(trajectories.final, [row - rows[0] for row in share])
                decoded = self.pipeline.decode(
                    latents, batch_size=self.config.rollout.decode_batch_size
                )
                self.cost.flops += len(share) * self.cost.decode_flops
            pending.videos.update(zip(share, decoded))
            unscored.append((decoded, [prompts[row] for row in share]))
            if not self.config.reward.score_between_stages:
                pending.batches.append(scorer.submit(*unscored, fps=fps))
                unscored = []
        if self.pipeline.frozen and is_scored:
            self.pipeline.frozen.leave()  # all batches are sampled: see `_wait`
        if unscored:
            pending.batches.append(scorer.submit(*unscored, fps=fps))
        return Trajectories.cat(parts), pending
