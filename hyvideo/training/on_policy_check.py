"""The on-policy check: on fresh rollouts the training path must give the rollouts' own log-probabilities.

Before the first update of an iteration the policy is what it was in the rollout, so every ratio is 1. Where it is not,
rollout and update do not compute the same thing, and what is trained is not what was sampled. The check reads the
passes of the first update, which are made anyway: the first of them, and all before the optimizer's step.
"""

import torch
from torch import Tensor

from hyvideo.config.sections import LossSettings
from hyvideo.distributed.collectives import gather_ranks
from hyvideo.distributed.mesh import Mesh
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.training.rollout_batch import RolloutBatch

# In float32 only the order of additions may differ, where the batch shape does.
FLOAT32_TOLERANCE = 1e-6


class OffPolicyError(RuntimeError):
    """Rollout and update do not compute the same log-probability."""


def tolerance_of(loss: LossSettings, dtype: str) -> float:
    """Bound of |log ratio|. In bf16 another batch shape rounds otherwise; beyond the clip range it would clip."""
    if loss.gate_tolerance is not None:
        return loss.gate_tolerance
    return FLOAT32_TOLERANCE if dtype == "fp32" else loss.clip_range


class OnPolicyCheck:
    """Stops the run where fresh rollouts have a ratio other than 1, and says why.

    Args:
        tolerance: Bound of |log ratio|.
        interval: Iterations between two checks; 0 never checks.
        batch_size: Rollouts that were sampled together.
    """

    def __init__(
        self, mesh: Mesh, pipeline: HunyuanVideoGRPOPipeline, *, tolerance: float, interval: int, batch_size: int
    ):
        self.mesh, self.pipeline = mesh, pipeline
        self.tolerance, self.interval, self.batch_size = tolerance, interval, batch_size

    def is_due(self, iteration: int) -> bool:
        """Claims that this iteration's first update is checked."""
        return self.interval > 0 and iteration % self.interval == 0

    def __call__(
        self, rollouts: RolloutBatch, passes: list[tuple[list[int], int]], deviations: list[Tensor], iteration: int
    ) -> None:
        """Raises OffPolicyError, on all ranks alike, where passes over fresh rollouts are off their policy on any.

        Args:
            passes: Rows and turn of each.
            deviations: Largest deviation of a ratio from 1 in each of the passes made so far.
        """
        local = torch.stack(deviations)
        of_ranks = gather_ranks(local.amax(), self.mesh)
        if not (of_ranks > self.tolerance).any():
            return
        rows, turn = passes[int(local.argmax())]
        message = self._diagnosis(rollouts, rows or [0], turn, iteration)
        worst = int(of_ranks.argmax())
        raise OffPolicyError(
            message if worst == self.mesh.rank else f"rank {worst} says why the run stops; here: {message}"
        )

    def _diagnosis(self, rollouts: RolloutBatch, rows: list[int], turn: int, iteration: int) -> str:
        from hyvideo.training.on_policy_diagnosis import Transitions, explain

        rows = self._worst_last(rollouts, rows, turn)
        steps = rollouts.trained_steps[rows, turn]
        transitions = Transitions(
            replay=lambda: rollouts.replay(self.pipeline, rows, steps).log_prob,
            replay_as_rollout=lambda: self._replay_as_rollout(rollouts, rows[-1], int(steps[-1])),
            log_probs=rollouts.trajectories.log_probs[rows, steps],
        )
        return explain(transitions, self.pipeline, tolerance=self.tolerance, rank=self.mesh.rank, iteration=iteration)

    def _worst_last(self, rollouts: RolloutBatch, rows: list[int], turn: int) -> list[int]:
        """The rows, that with the largest deviation in the end."""
        steps = rollouts.trained_steps[rows, turn]
        with torch.no_grad():
            log_ratio = (
                rollouts.replay(self.pipeline, rows, steps).log_prob - rollouts.trajectories.log_probs[rows, steps]
            )
        worst = rows[int(log_ratio.abs().argmax())]
        return [row for row in rows if row != worst] + [worst]

    def _replay_as_rollout(self, rollouts: RolloutBatch, row: int, step: int) -> Tensor:
        """Log-probability of a row in the batch in which it was sampled. Shape: ()."""
        first = row // self.batch_size * self.batch_size
        batch = list(range(first, min(first + self.batch_size, len(rollouts))))
        # That row last: it is the one whose way through the modules is compared.
        batch = [other for other in batch if other != row] + [row]
        with torch.no_grad():
            return rollouts.replay(self.pipeline, batch, torch.full((len(batch),), step)).log_prob[-1]
