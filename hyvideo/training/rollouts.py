"""Sampling of an iteration's rollouts. A batch is decoded and submitted for scoring while the next
one is sampled, or all are submitted after the last one.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hyvideo.data.prompts import PromptOrder, Request
from hyvideo.data.randomness import generator
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.models.offload import leave
from hyvideo.models.placement import Placement
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import Trajectories
from hyvideo.rewards.scoring import Batch
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.run_inputs import RunInputs
from hyvideo.training.objective import Objective
from hyvideo.training.rewards import GroupRewards, PendingRewards
from hyvideo.training.rollout_batch import (
    Prompts,
    RolloutBatch,
    RolloutIndex,
    chunks,
    indices_of_replica,
    select,
)


class Rollouts:
    """Samples the rollouts of an iteration on this replica."""

    def __init__(
        self,
        objective: Objective,
        encoder: ConditionEncoder,
        rewards: GroupRewards,
        inputs: RunInputs,  # prompts, and the plan of an iteration
    ):
        self.objective = objective
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
        self.is_scored = self.config.objective.scores_rollouts
        self.has_reward_column = self.config.objective.reward_weight > 0
        self.schedule = self.config.sampling.schedule()  # regardless of an SDE window
        self.order = PromptOrder(len(self.requests), self.plan.groups, self.config.data.seed)
        self.window = parse_window(
            self.config.objective.window, len(self.schedule.stochastic_steps)
        )

    def choose(self, iteration: int) -> Prompts:
        """Return the prompts of an iteration, one for each group."""
        indices = indices_of_replica(self.config.rollout, self.mesh)
        order = self.order.indices(iteration)
        requests = [self.requests[order[index.group]] for index in indices]
        return Prompts(iteration, indices, requests)

    def encode(self, requests: list[Request]) -> Conditions:
        """Return the conditions of requests, on the device of the pipeline."""
        return self.encoder(requests, self.config.sampling.size).to(self.pipeline.device)

    def collect(
        self, prompts: Prompts, conditions: Conditions
    ) -> tuple[RolloutBatch, PendingRewards]:
        """Sample an iteration; return its rollouts and, if the objective needs rewards, this rank's
        videos and pending rewards, else advantages 0.
        """
        iteration, indices, requests = prompts
        schedule = self.schedule_of(iteration)
        trained = self._trained_steps(schedule, iteration, indices)
        texts = [request.prompt for request in requests]
        batches = self._batches(iteration, schedule, indices, conditions, trained)
        trajectories, pending = self._score_each(batches, texts)
        # without noise levels, the KL is measured at the reward step
        columns = self.plan.num_trained_steps or trained.shape[1]
        anchor_columns = self.noise.anchor_columns(iteration, columns, self.plan.num_anchor_steps)
        rollouts = RolloutBatch(
            indices=indices,
            prompts=texts,
            conditions=conditions,
            trajectories=trajectories,
            schedule=schedule,
            trained_steps=trained,
            has_reward_column=self.has_reward_column,
            anchor_columns=anchor_columns,
            iteration=iteration,
        )
        if not self.is_scored:
            zeros = torch.zeros(len(indices), device=self.pipeline.device)
            rollouts = rollouts.with_rewards({}, zeros)
        return rollouts, pending

    def _trained_steps(
        self, schedule: Schedule, iteration: int, indices: list[RolloutIndex]
    ) -> Tensor:
        """Return what is trained of each rollout, with the level of the last step as the column of
        the reward gradient. Shape: (rollouts, columns), on the CPU.
        """
        # With a guidance interval, all FSDP ranks must train the same step at the same time, to
        # make the same calls.
        is_guided = max(self.config.policy_cfg_scale, self.config.anchor_cfg_scale) > 1
        has_shared_order = self.config.rollout.guidance_interval and is_guided
        order_of = [RolloutIndex(0, 0)] * len(indices) if has_shared_order else indices
        count = self.plan.num_trained_steps
        trained = self.objective.draw(schedule, iteration, order_of, count)
        if not self.has_reward_column:
            return trained
        last = torch.full((len(indices), 1), schedule.sigmas[-2])
        return torch.cat([trained.view(len(indices), count), last], dim=1)

    def schedule_of(self, iteration: int) -> Schedule:
        """Return the schedule of an iteration, which adds noise only in its SDE window."""
        schedule = self.objective.schedule(self.schedule, iteration)
        if self.window is None:
            return schedule
        random = generator(self.config.data.seed, "sde window", iteration)
        steps = self.window.steps(
            schedule.stochastic_steps, iteration, lambda count: int(random.integers(count))
        )
        return schedule.with_noise_only_at(steps)

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
                    mean_steps=trained[rows] if self.objective.needs_means else None,
                    keeps_all=self.objective.keeps_all_latents or self.has_reward_column,
                )
                self.cost.add(len(rows) * self.pipeline.num_forwards(schedule.timesteps))
            yield rows, trajectories

    def _score_each(
        self,
        batches: Iterable[tuple[list[int], Trajectories]],
        prompts: list[str],
    ) -> tuple[Trajectories, PendingRewards]:
        """Decode batches and submit them for scoring, each at once, or all at the end
        (``offload reward``).
        """
        scorer, fps = self.rewards.scorer, self.config.data.fps
        parts: list[Trajectories] = []
        unscored: list[Batch] = []
        pending = PendingRewards()
        num_batches = math.ceil(len(prompts) / self.config.rollout.batch_size)
        for rows, trajectories in batches:
            parts.append(trajectories)
            share = self.mesh.rank_share(rows)
            if not share or not self.is_scored:
                continue
            with self.progress.timed("decode", f"batch {len(parts)}/{num_batches}"):
                latents = select(trajectories.final, [row - rows[0] for row in share])
                decoded = self.pipeline.decode(
                    latents, batch_size=self.config.rollout.decode_batch_size
                )
                self.cost.flops += len(share) * self.cost.decode_flops
            pending.videos.update(zip(share, decoded))
            unscored.append((decoded, [prompts[row] for row in share]))
            if self.config.placements.scorers == Placement.GPU:
                pending.batches.append(scorer.submit(*unscored, fps=fps))
                unscored = []
        if self.is_scored:
            leave(self.pipeline.transformer)  # all are sampled, and scorers need the memory
        if unscored:
            pending.batches.append(scorer.submit(*unscored, fps=fps))
        return Trajectories.cat(parts), pending
