"""The on-policy check: on fresh rollouts the training path must give the rollouts' own log-probabilities.

Before the first update of an iteration the policy is what it was in the rollout, so every ratio is 1. Where it is not,
rollout and update do not compute the same thing, and what is trained is not what was sampled. The check reads the
passes of the first update, which are made anyway: the first of them, and all before the optimizer's step.
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

# What is computed in equal shapes has equal bits; in float32 another shape changes the order of additions only.
EXACT = 1e-6


class OffPolicyError(RuntimeError):
    """Rollout and update do not compute the same log-probability."""


def tolerances_of(loss: LossSettings, dtype: str) -> tuple[float, float]:
    """Bounds of |log ratio| where rollout and update call the transformer in equal shapes, and where in others.

    In bf16 another shape rounds otherwise; beyond the clip range it would clip.
    """
    if loss.gate_tolerance is not None:
        return loss.gate_tolerance, loss.gate_tolerance
    return EXACT, EXACT if dtype == "fp32" else loss.clip_range


class OnPolicyCheck:
    """Stops the run where fresh rollouts, sampled ``batch_size`` together in ``dtype``, have ratios other than 1."""

    def __init__(self, mesh: Mesh, pipeline: GRPOPipeline, loss: LossSettings, *, dtype: str, batch_size: int):
        self.mesh, self.pipeline, self.batch_size = mesh, pipeline, batch_size
        self.tolerances, self.interval = tolerances_of(loss, dtype), loss.gate_interval

    def is_due(self, iteration: int) -> bool:
        """Claims that this iteration's first update is checked."""
        return self.interval > 0 and iteration % self.interval == 0

    def __call__(
        self, rollouts: RolloutBatch, passes: list[tuple[list[int], int]], deviations: list[Tensor], iteration: int
    ) -> None:
        """Raises OffPolicyError, on all ranks alike, where a pass made so far has a ratio too far from 1."""
        shapes = [self._shapes(rollouts, *a_pass) for a_pass in passes[: len(deviations)]]
        bounds = [self.tolerances[differ is not None] for differ in shapes]
        local = torch.stack(deviations) / filled(bounds, deviations[0].device)
        of_ranks = gather_ranks(local, self.mesh)
        if not (of_ranks > 1).any():
            return
        number = int(of_ranks.amax(0).argmax())  # one turn on all ranks, and so calls of as many branches
        message = self._diagnosis(rollouts, passes[number], iteration, bounds[number], shapes[number])
        worst = int(of_ranks.amax(1).argmax())
        raise OffPolicyError(
            message if worst == self.mesh.rank else f"rank {worst} reports why the run stops; this rank: {message}"
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

        turn = a_pass[1]
        rows = self._worst_last(rollouts, a_pass[0] or [0], turn)
        num_rows = gather_ranks(torch.tensor(len(rows)), self.mesh)
        steps = rollouts.trained_steps[rows, turn]
        transitions = Transitions(
            replay=lambda: rollouts.replay(self.pipeline, rows, steps).log_prob,
            replay_as_rollout=lambda: self._replay_as_rollout(rollouts, rows[-1], int(steps[-1])),
            log_probs=rollouts.trajectories.log_probs[rows, steps],
            dtype=rollouts.conditions.samples[0].text.dtype,
            is_even=len(num_rows.unique()) == 1,
            shapes=shapes,
        )
        return explain(transitions, self.pipeline, tolerance=tolerance, rank=self.mesh.rank, iteration=iteration)

    def _shapes(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> str | None:
        """Shapes of the transformer's calls in the rollout and in a pass over ``rows``; None where they are equal."""
        lengths = [sample.lengths for sample in rollouts.conditions.samples]
        for batch in (self._sampled_with(rollouts, row) for row in rows if self.pipeline.sampling.batched_forward):
            if [lengths[row] for row in batch] != [lengths[row] for row in rows]:
                of_both = [self._shape(rollouts, calls, turn) for calls in (batch, rows)]
                return f"{of_both[0]} in the rollout, {of_both[1]} in the update"
        return None

    def _shape(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> str:
        """Samples, guidance branches and tokens, those of the longest conditions, of a call at a turn's step."""
        transformer, timesteps = self.pipeline.transformer, self.pipeline.scheduler.timesteps
        guided = self.pipeline.sampling.guides(timesteps[rollouts.trained_steps[rows[0], turn]].item())
        sizes, patch = rollouts.trajectories.latents.shape[3:], family_of(transformer).patch(transformer.config)
        video = math.prod(size // p for size, p in zip(sizes, patch))
        conditions = rollouts.conditions.select(rows)
        if guided:
            conditions += conditions.with_text_of(self.pipeline.negative)
        longest = max(sum(sample.lengths) for sample in conditions.samples)
        return f"{len(rows)} x {1 + guided} x {video + longest}"

    def _worst_last(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> list[int]:
        """The rows, that with the largest deviation in the end."""
        steps = rollouts.trained_steps[rows, turn]
        with torch.no_grad():
            log_probs = rollouts.replay(self.pipeline, rows, steps).log_prob
        worst = rows[int((log_probs - rollouts.trajectories.log_probs[rows, steps]).abs().argmax())]
        return [row for row in rows if row != worst] + [worst]

    def _replay_as_rollout(self, rollouts: RolloutBatch, row: int, step: int) -> Tensor:
        """Log-probability of a row in the batch in which it was sampled. Shape: ()."""
        # That row last: it is the one whose way through the modules is compared.
        batch = [other for other in self._sampled_with(rollouts, row) if other != row] + [row]
        with torch.no_grad():
            return rollouts.replay(self.pipeline, batch, torch.full((len(batch),), step)).log_prob[-1]

    def _sampled_with(self, rollouts: RolloutBatch, row: int) -> list[int]:
        """Rows of the batch in which a row was sampled."""
        first = row // self.batch_size * self.batch_size
        return list(range(first, min(first + self.batch_size, len(rollouts))))
