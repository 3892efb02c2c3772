"""Rated pairs of videos in place of rollouts: the batch of an iteration, its labels, and the
held-out pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from hyvideo.data.pairs import Preference, Preferences
from hyvideo.data.prompts import PromptOrder, Request
from hyvideo.distributed.collectives import merge_rows
from hyvideo.distributed.mesh import Mesh
from hyvideo.grpo.dpo import accuracy_of
from hyvideo.models.conditions import to_device
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline, Trajectories
from hyvideo.records.stage_timer import StageTimer
from hyvideo.rewards.rewards import Reward
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.config import Config
from hyvideo.settings.iteration_plan import Plan
from hyvideo.training.cost import Cost
from hyvideo.training.objectives.dpo import DPO
from hyvideo.training.pair_latents import PairLatents
from hyvideo.training.rollout_batch import RolloutBatch, RolloutIndex, indices_of_replica
from hyvideo.training.rollout_collector import PendingRewards

HELD_OUT_LEVELS = 4  # noise levels at which the accuracy on held-out pairs is measured


class PairCollector:
    """Reads the pairs of an iteration on this replica: the interface of `RolloutCollector`.

    Each pair is a group of two: member 0 is the winner, member 1 the loser.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        pipeline: GRPOPipeline,
        encoder: ConditionEncoder,
        preferences: Preferences,
        latents: PairLatents,
        objective: DPO,
        *,
        plan: Plan,
        schedule: Schedule,
        cost: Cost,
        # called before each iteration on all ranks; raises to stop the run
        check: Callable[[], None] = lambda: None,
    ):
        self.config = config
        self.mesh = mesh
        self.pipeline = pipeline
        self.encoder = encoder
        self.preferences = preferences
        self.latents = latents
        self.objective = objective
        self.plan = plan
        self.schedule = schedule
        self.cost = cost
        self.check = check
        self.order = PromptOrder(len(preferences.train), plan.groups, config.data.seed)
        self.mean_weight = fmean(preference.weight for preference in preferences.train)

    @property
    def requests(self) -> list[Request]:
        """Prompts that are trained on."""
        return self.preferences.requests

    def collect(self, iteration: int, timer: StageTimer) -> tuple[RolloutBatch, PendingRewards]:
        """Return the pairs of an iteration, without advantages, and no pending rewards."""
        self.check()
        order = self.order.indices(iteration)
        batches = range(self.config.rollout.gradient_accumulation_steps)
        indices = [
            index
            for batch in batches
            for index in indices_of_replica(self.config.rollout, self.mesh, batch)
        ]
        pairs = [self.preferences.train[order[index.group]] for index in indices]
        with timer("pairs", f"{len(pairs)} videos"):
            rollouts = self.batch(iteration, indices, pairs, self.plan.num_trained_steps)
        self.cost.start()
        return rollouts, PendingRewards()

    def batch(
        self,
        iteration: int,
        indices: list[RolloutIndex],
        pairs: Sequence[Preference],  # of each video
        num_levels: int,
    ) -> RolloutBatch:
        """Return videos of pairs as rollouts of which only the final latents are known."""
        requests = [pair.request for pair in pairs]
        conditions = self.encoder(
            requests, height=self.config.data.height, width=self.config.data.width
        )
        read = [
            self.latents.read(pair.videos[index.member])
            for pair, index in zip(pairs, indices, strict=True)
        ]
        latents = to_device(torch.stack(read), self.pipeline.device)
        weights = torch.tensor([pair.weight / self.mean_weight for pair in pairs])
        levels = self.objective.draw(self.schedule, iteration, indices, num_levels)
        return RolloutBatch(
            indices=indices,
            prompts=[request.prompt for request in requests],
            conditions=conditions.to(self.pipeline.device),
            trajectories=Trajectories(
                latents=latents[:, None], log_probs=latents.new_zeros(len(latents), 0)
            ),
            schedule=self.schedule,
            trained_steps=levels,
            anchor_columns=list(range(num_levels)),
            iteration=iteration,
            weights=to_device(weights, self.pipeline.device),
        )


class PairLabels:
    """The answers of raters in place of rewards: the interface of `GroupRewards`."""

    def wait(
        self, pending: PendingRewards, may_end: Callable[[bool], bool] = bool
    ) -> dict[int, Reward]:
        """Return no rewards, because no video is scored."""
        return {}

    def advantages(
        self, indices: Sequence[RolloutIndex], rewards: Mapping[int, Reward]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return 1 for winners and -1 for losers, shape (videos,), and the number of missing
        rewards, 0.
        """
        return torch.tensor([1.0 if index.member == 0 else -1.0 for index in indices]), {
            "reward/missing": 0.0
        }

    def check_failed_rewards(self, *arguments: object, **options: object) -> None:
        """Accept everything: answers were checked before the run."""


class HeldOutPairs:
    """Measures how often the policy agrees with answers to prompts that it does not train on."""

    def __init__(self, collector: PairCollector):
        self.collector = collector
        self.pairs = collector.preferences.held_out
        self._base_errors: list[Tensor] = []  # of the batches; the base model does not change

    def measure(self) -> dict[str, float]:
        """Return the metrics of the held-out pairs; empty if there are none. Collective.

        The policy agrees with an answer if its velocity errors, relative to those of the base model
        and averaged over the noise levels, are smaller for the winner.
        """
        if not self.pairs:
            return {}
        margins: dict[int, list[float]] = {}
        for number, rows in enumerate(self._batches()):
            self.collector.check()
            indices = [RolloutIndex(row, member) for row in rows for member in (0, 1)]
            pairs = [self.pairs[index.group] for index in indices]
            # no iteration has the number 0
            batch = self.collector.batch(0, indices, pairs, HELD_OUT_LEVELS)
            objective = self.collector.objective
            if number == len(self._base_errors):
                self._base_errors.append(objective.errors(batch, of_base_model=True))
            # (videos, levels)
            change = objective.errors(batch, of_base_model=False) - self._base_errors[number]
            beta = self.collector.config.objective.dpo_beta
            of_pairs = change.mean(1).view(-1, 2)
            margin = -beta / 2 * (of_pairs[:, 0] - of_pairs[:, 1])
            margins |= {row: [value] for row, value in zip(rows, margin.tolist(), strict=True)}
        merged = merge_rows(margins, len(self.pairs), 1, self.collector.mesh)[:, 0]
        return {
            "dpo/held_out_accuracy": accuracy_of(merged).mean().item(),
            "dpo/held_out_margin": merged.mean().item(),
        }

    def _batches(self) -> list[list[int]]:
        """Return this replica's pairs in batches; the last pair may be repeated, so that replicas
        have equally many.
        """
        mesh = self.collector.mesh
        count = -(-len(self.pairs) // mesh.num_replicas)
        last = len(self.pairs) - 1
        rows = [min(mesh.replica + number * mesh.num_replicas, last) for number in range(count)]
        size = max(1, self.collector.config.rollout.batch_size // 2)
        return [rows[start : start + size] for start in range(0, len(rows), size)]
