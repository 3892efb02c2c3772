"""Sampling of rollouts: a batch is scored in the background while the next one is sampled, or after
all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hyvideo.data.prompts import PromptOrder, Request
from hyvideo.data.randomness import generator
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, Trajectories
from hyvideo.records.stage_timer import StageTimer
from hyvideo.rewards.scoring import AsyncScorer, PendingBatch
from hyvideo.schedulers.noise_window import parse_window
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import Plan
from hyvideo.training.cost import Cost
from hyvideo.training.objective import Objective
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex, indices_of_replica, select


@dataclass(frozen=True)
class PendingRewards:
    """Videos that this rank has decoded and their pending rewards, in the same order."""

    # by row; None if it contains NaN or inf
    videos: dict[int, Tensor | None] = field(default_factory=dict)
    batches: list[PendingBatch] = field(default_factory=list)


class RolloutCollector:
    """Samples the rollouts of an iteration on this replica."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pipeline: GRPOPipeline,
        encoder: ConditionEncoder,
        scorer: AsyncScorer,
        requests: list[Request],  # all prompts of the data set
        objective: Objective,  # draws what is trained of each rollout
        *,
        plan: Plan,  # prompts per iteration and trained steps per rollout
        schedule: Schedule,  # of the rollouts, regardless of an SDE window
        cost: Cost,  # counts forward passes and FLOPs
        # called before each batch on all ranks; raises to stop the run
        check: Callable[[], None] = lambda: None,
    ):
        self.config = config
        self.mesh = mesh
        self.pipeline = pipeline
        self.encoder = encoder
        self.scorer = scorer
        self.requests = requests
        self.objective = objective
        self.noise = objective.noise
        self.plan = plan
        self.cost = cost
        self.check = check
        self.schedule = schedule
        self.order = PromptOrder(len(requests), plan.groups, config.data.seed)
        self.window = parse_window(config.objective.window, len(schedule.stochastic_steps))

    def collect(self, iteration: int, timer: StageTimer) -> tuple[RolloutBatch, PendingRewards]:
        """Sample an iteration; return its rollouts, without advantages, and this rank's videos and
        pending rewards.
        """
        schedule = self.schedule_of(iteration)
        indices = self.indices()
        requests = self.requests_of(iteration, indices)
        with timer("conditions", f"{len(requests)} prompts"):
            conditions = self.encoder(
                requests, height=self.config.data.height, width=self.config.data.width
            )
            conditions = conditions.to(self.pipeline.device)
        self.cost.start()
        prompts = [request.prompt for request in requests]
        # With a guidance interval, all FSDP ranks must train the same step at the same time, to
        # make the same calls.
        is_guided = max(self.config.rollout.cfg_scale, self.config.anchor_cfg_scale) > 1
        has_shared_order = self.config.rollout.guidance_interval and is_guided
        order_of = [RolloutIndex(0, 0)] * len(indices) if has_shared_order else indices
        count = self.plan.num_trained_steps
        trained = self.objective.draw(schedule, iteration, order_of, count)
        mean_steps = trained if self.objective.needs_means else None
        trajectories, pending = self._sample_and_submit(
            iteration, schedule, indices, conditions, prompts, mean_steps, timer
        )
        rollouts = RolloutBatch(
            indices,
            prompts,
            conditions,
            trajectories,
            schedule,
            trained,
            anchor_columns=self.noise.anchor_columns(iteration, count, self.plan.num_anchor_steps)
            if count
            else [],
            iteration=iteration,
        )
        return rollouts, pending

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

    def indices(self) -> list[RolloutIndex]:
        """Return the indices of this replica's rollouts in an iteration."""
        batches = range(self.config.rollout.gradient_accumulation_steps)
        return [
            index
            for batch in batches
            for index in indices_of_replica(self.config.rollout, self.mesh, batch)
        ]

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
            keeps_all=self.objective.keeps_all_latents,
        )

    def _sample_and_submit(
        self,
        iteration: int,
        schedule: Schedule,
        indices: list[RolloutIndex],
        conditions: Conditions,
        prompts: list[str],
        mean_steps: Tensor | None,
        timer: StageTimer,
    ) -> tuple[Trajectories, PendingRewards]:
        """Sample batches and submit them for scoring, each at once, or all at the end
        (``scores_between_stages``).
        """
        rollout = self.config.rollout
        parts = []
        unscored = []
        pending = PendingRewards()
        starts = range(0, len(indices), rollout.batch_size)
        for number, start in enumerate(starts, 1):
            self.check()
            rows = list(range(start, min(start + rollout.batch_size, len(indices))))
            batch_steps = None if mean_steps is None else mean_steps[rows]
            with timer("rollout", f"batch {number}/{len(starts)}"):
                batch = [indices[row] for row in rows]
                parts.append(
                    self.sample(
                        iteration, schedule, batch, conditions.select(rows), mean_steps=batch_steps
                    )
                )
                self.cost.add(len(rows) * self.pipeline.num_forwards(schedule.timesteps))
            share = self.mesh.rank_share(rows)
            if not share or not self.objective.needs_rewards:
                continue
            with timer("decode", f"batch {number}/{len(starts)}"):
                latents = select(parts[-1].final, [row - start for row in share])
                decoded = self.pipeline.decode(latents, batch_size=rollout.decode_batch_size)
                self.cost.flops += len(share) * self.cost.decode_flops
            pending.videos.update(zip(share, decoded))
            unscored.append((decoded, [prompts[row] for row in share]))
            if not self.config.reward.scores_between_stages:
                pending.batches.append(self.scorer.submit(*unscored, fps=self.config.data.fps))
                unscored = []
        if unscored:
            pending.batches.append(self.scorer.submit(*unscored, fps=self.config.data.fps))
        return Trajectories.cat(parts), pending
