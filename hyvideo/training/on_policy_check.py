"""On-policy check: before the first update, the training path must reproduce the log-probabilities of the rollouts.

The policy is then still the rollout policy, so every ratio is 1. Any other ratio means that rollout and update compute
different numbers, and that the trained policy is not the sampled one.
"""

import math

import torch
from torch import Tensor

from hyvideo.config.sections import LossSettings
from hyvideo.distributed.collectives import gather_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.family import family_of
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.schedulers.scheduling_flow_match_discrete import filled
from hyvideo.training.rollout_batch import RolloutBatch

# Equal shapes give bitwise equal results; in float32, other shapes change only the order of additions.
EXACT = 1e-6


class OffPolicyError(RuntimeError):
    """Rollout and update compute different log-probabilities."""


def log_ratio_tolerances(loss: LossSettings, dtype: str) -> tuple[float, float]:
    """Return the limits of |log ratio| for equal and for different shapes of the transformer calls.

    In bf16, other shapes round differently. The limit is then the clip range, beyond which the loss would be clipped.
    """
    if loss.gate_tolerance is not None:
        return loss.gate_tolerance, loss.gate_tolerance
    return EXACT, EXACT if dtype == "fp32" else loss.clip_range


class OnPolicyCheck:
    """Stops the run if the ratios of fresh rollouts, sampled in batches of ``batch_size`` in ``dtype``, are not 1."""

    def __init__(self, mesh: Mesh, pipeline: GRPOPipeline, loss: LossSettings, *, dtype: str, batch_size: int):
        self.mesh, self.pipeline, self.batch_size = mesh, pipeline, batch_size
        self.tolerances, self.interval = log_ratio_tolerances(loss, dtype), loss.gate_interval

    def is_due(self, iteration: int) -> bool:
        """Return whether the first update of this iteration is checked."""
        return self.interval > 0 and iteration % self.interval == 0

    def __call__(
        self, rollouts: RolloutBatch, passes: list[tuple[list[int], int]], deviations: list[Tensor], iteration: int
    ) -> None:
        """Raise OffPolicyError on all ranks if one of ``deviations``, the largest |ratio - 1| by pass, is too large."""
        shapes = [self._shape_difference(rollouts, *a_pass) for a_pass in passes[: len(deviations)]]
        limits = [self.tolerances[difference is not None] for difference in shapes]
        local = torch.stack(deviations) / filled(limits, deviations[0].device)
        by_rank = gather_ranks(local, self.mesh)
        if not (by_rank > 1).any():
            return
        index = int(by_rank.amax(0).argmax())  # the same pass on all ranks, so that they make the same number of calls
        message = self._diagnosis(rollouts, passes[index], iteration, limits[index], shapes[index])
        worst = int(by_rank.amax(1).argmax())
        raise OffPolicyError(
            message if worst == self.mesh.rank else f"rank {worst} has the largest deviation; on this rank: {message}"
        )

    def _diagnosis(
        self,
        rollouts: RolloutBatch,
        a_pass: tuple[list[int], int],
        iteration: int,
        tolerance: float,
        shapes: str | None,
    ) -> str:
        from hyvideo.training.on_policy_diagnosis import Transitions, explain

        column = a_pass[1]
        rows = self._worst_last(rollouts, a_pass[0] or [0], column)
        num_rows = gather_ranks(torch.tensor(len(rows)), self.mesh)
        steps = rollouts.trained_steps[rows, column]
        transitions = Transitions(
            replay=lambda: rollouts.replay(self.pipeline, rows, steps).log_prob,
            replay_as_rollout=lambda: self._replay_as_rollout(rollouts, rows[-1], int(steps[-1])),
            log_probs=rollouts.trajectories.log_probs[rows, steps],
            dtype=rollouts.conditions.samples[0].text.dtype,
            is_even=len(num_rows.unique()) == 1,
            shapes=shapes,
        )
        return explain(transitions, self.pipeline, tolerance=tolerance, rank=self.mesh.rank, iteration=iteration)

    def _shape_difference(self, rollouts: RolloutBatch, rows: list[int], column: int) -> str | None:
        """Return the shapes of the transformer calls in the rollout and in a pass as text; None if they are equal."""
        lengths = [sample.lengths for sample in rollouts.conditions.samples]
        for batch in (self._sampled_with(rollouts, row) for row in rows if self.pipeline.sampling.batched_forward):
            if [lengths[row] for row in batch] != [lengths[row] for row in rows]:
                in_rollout, in_update = (self._shape(rollouts, call, column) for call in (batch, rows))
                return f"{in_rollout} in the rollout, {in_update} in the update"
        return None

    def _shape(self, rollouts: RolloutBatch, rows: list[int], column: int) -> str:
        """Return ``samples x branches x tokens`` of a transformer call, with the tokens of its longest condition."""
        transformer, timesteps = self.pipeline.transformer, self.pipeline.scheduler.timesteps
        guided = self.pipeline.sampling.is_guided(timesteps[rollouts.trained_steps[rows[0], column]].item())
        sizes, patch = rollouts.trajectories.latents.shape[3:], family_of(transformer).patch(transformer.config)
        video = math.prod(size // p for size, p in zip(sizes, patch))
        conditions = rollouts.conditions.select(rows)
        if guided:
            conditions += conditions.with_text_of(self.pipeline.negative)
        longest = max(sum(sample.lengths) for sample in conditions.samples)
        return f"{len(rows)} x {1 + guided} x {video + longest}"

    def _worst_last(self, rollouts: RolloutBatch, rows: list[int], column: int) -> list[int]:
        """Return the rows, with the row of the largest deviation last."""
        steps = rollouts.trained_steps[rows, column]
        with torch.no_grad():
            log_probs = rollouts.replay(self.pipeline, rows, steps).log_prob
        worst = rows[int((log_probs - rollouts.trajectories.log_probs[rows, steps]).abs().argmax())]
        return [row for row in rows if row != worst] + [worst]

    def _replay_as_rollout(self, rollouts: RolloutBatch, row: int, step: int) -> Tensor:
        """Return the log-probability of a row, computed in the batch in which it was sampled. Shape: ()."""
        # `on_policy_diagnosis` compares the module outputs of the last row.
        batch = [member for member in self._sampled_with(rollouts, row) if member != row] + [row]
        with torch.no_grad():
            return rollouts.replay(self.pipeline, batch, torch.full((len(batch),), step)).log_prob[-1]

    def _sampled_with(self, rollouts: RolloutBatch, row: int) -> list[int]:
        first = row // self.batch_size * self.batch_size
        return list(range(first, min(first + self.batch_size, len(rollouts))))
