"""Updates with NaN or inf in loss or gradient: skipped by all ranks and counted.

A run that resumes from the checkpoint before such an update samples its rollouts again, bit for
bit.
"""

import statistics
import sys
from collections import deque

from hyvideo.distributed.mesh import Mesh

_NORM_WINDOW = 50  # number of gradient norms in the median
_SPIKE = 10.0  # a larger ratio to the median is reported


class NonFiniteUpdates:
    """Counts skipped updates, ends the run after ``max_bad_updates`` in a row, and warns of
    gradient spikes.
    """

    def __init__(self, mesh: Mesh, *, max_bad_updates: int):
        self.mesh, self.max_bad_updates = mesh, max_bad_updates
        self.bad_in_a_row = 0
        # iteration in which loss or gradient last left the usual range; 0: never
        self.last_outlier = 0
        self.norms: deque[float] = deque(maxlen=_NORM_WINDOW)
        self._has_reported_zero = False

    def record_finite(self, grad_norm: float, iteration: int) -> None:
        """Record an applied update; warn once if its gradient is exactly 0."""
        self.bad_in_a_row = 0
        if grad_norm == 0 and not self._has_reported_zero and self.mesh.is_main:
            self._has_reported_zero = True
            print(
                f"\nwarning: the gradient is exactly 0 in iteration {iteration}, so nothing is "
                "learned from it. Check that the loss depends on the policy, and that not all of "
                "its terms are masked or clipped. This is not printed again",
                file=sys.stderr,
                flush=True,
            )

    def record_skipped(self, *, ranks: list[int], iteration: int) -> None:
        """Record a skipped update, whose loss is not finite on ``ranks``, or else its gradient.

        Raises FloatingPointError, on all ranks together, after too many in a row.
        """
        self.last_outlier = self.last_outlier if self.bad_in_a_row else iteration
        self.bad_in_a_row += 1
        where = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "the gradient"
        message = f"skipped an update of iteration {iteration} on all ranks: NaN or inf in {where}"
        if self.mesh.is_main:
            print(f"\n{message}", file=sys.stderr, flush=True)
        if self.bad_in_a_row >= self.max_bad_updates:
            raise FloatingPointError(
                f"{message}, the last of max_bad_updates={self.max_bad_updates} skipped updates in "
                "a row. The policy is that of the last finite update. Lower learning_rate"
            )

    def divergence(self, iteration: int) -> str:
        """Return a message that explains videos with NaN by divergence of the policy; empty in the
        first iteration.
        """
        if iteration == 1:
            return ""
        is_recent = self.last_outlier >= max(1, iteration - _NORM_WINDOW)
        if is_recent:
            return (
                "The policy has diverged: loss or gradient left the usual range in iteration "
                f"{self.last_outlier}. Lower learning_rate, and resume from a checkpoint before "
                "that iteration"
            )
        return (
            f"The policy has diverged suddenly, in the update of iteration {iteration - 1}: loss "
            "and gradient were in the usual range before it. Lower learning_rate"
        )

    def spike(self, norm: float, iteration: int) -> float:
        """Return the gradient norm divided by the median of previous norms, or 1 without any; warn
        if it is large.
        """
        ratio = (
            norm / statistics.median(self.norms)
            if self.norms and statistics.median(self.norms) > 0
            else 1.0
        )
        self.last_outlier = iteration if ratio > _SPIKE else self.last_outlier
        if ratio > _SPIKE and self.mesh.is_main:
            print(
                f"\ngradient norm is {ratio:.0f} times its median over {len(self.norms)} updates",
                file=sys.stderr,
            )
        self.norms.append(norm)
        return ratio

    def state_dict(self) -> dict:
        return {
            "bad_in_a_row": self.bad_in_a_row,
            "norms": list(self.norms),
            "last_outlier": self.last_outlier,
        }

    def load_state_dict(self, state: dict) -> None:
        self.bad_in_a_row = state["bad_in_a_row"]
        self.last_outlier = state["last_outlier"]
        self.norms = deque(state["norms"], maxlen=_NORM_WINDOW)
