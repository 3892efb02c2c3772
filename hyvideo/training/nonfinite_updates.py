"""Updates with NaN or inf in loss or gradient: skipped by all ranks and counted.

A run that resumes from the checkpoint before such an update samples its rollouts again, bit for
bit.
"""

import statistics
import sys
from collections import deque

from hyvideo.distributed.mesh import Mesh

_NORM_WINDOW = 50  # number of gradient norms in the median
_LEAST_NORMS = 5  # a median of fewer says nothing: the first norms of a run differ much


class NonFiniteUpdates:
    """Counts skipped updates, ends the run after ``max_bad_updates`` in a row, and compares gradient
    norms with their median.
    """

    def __init__(self, mesh: Mesh, *, max_bad_updates: int):
        self.mesh, self.max_bad_updates = mesh, max_bad_updates
        self.bad_in_a_row = 0
        self.norms: deque[float] = deque(maxlen=_NORM_WINDOW)

    def record_finite(self) -> None:
        """Record an applied update."""
        self.bad_in_a_row = 0

    def record_skipped(self, *, ranks: list[int], iteration: int) -> None:
        """Record a skipped update, whose loss is not finite on ``ranks``, or else its gradient.

        Raises FloatingPointError, on all ranks together, after too many in a row.
        """
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

    def spike(self, norm: float) -> float:
        """Return the gradient norm divided by the median of previous norms, or 1 with fewer than 5."""
        median = statistics.median(self.norms) if len(self.norms) >= _LEAST_NORMS else 0.0
        self.norms.append(norm)
        return norm / median if median > 0 else 1.0

    def state_dict(self) -> dict:
        return {"bad_in_a_row": self.bad_in_a_row, "norms": list(self.norms)}

    def load_state_dict(self, state: dict) -> None:
        self.bad_in_a_row = state["bad_in_a_row"]
        self.norms = deque(state["norms"], maxlen=_NORM_WINDOW)
