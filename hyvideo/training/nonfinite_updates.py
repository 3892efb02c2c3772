"""Updates with NaN or inf in loss or gradient: skipped by all ranks, counted, and saved for inspection.

bad_updates/000012-rank0.safetensors    data of this rank: latents, log-probabilities, trained steps, advantages
bad_updates/000012-rank0.json           prompts, rewards, and the ranks with the first NaN or inf

The newest three of each rank are kept.
"""

import statistics
import sys
from collections import deque
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from hyvideo.data.outside import replacing
from hyvideo.distributed.mesh import Mesh
from hyvideo.records.run_files import or_none, write_json
from hyvideo.training.rollout_batch import RolloutBatch

FOLDER = "bad_updates"
_NORM_WINDOW = 50  # number of gradient norms in the median
_SPIKE = 10.0  # a larger ratio to the median is reported
_MAX_SAVED = 3  # updates per rank


class NonFiniteUpdates:
    """Counts skipped updates, ends the run after ``max_bad_updates`` in a row, and warns of gradient spikes."""

    def __init__(self, output_dir: Path, mesh: Mesh, *, max_bad_updates: int):
        self.folder, self.mesh, self.max_bad_updates = output_dir / FOLDER, mesh, max_bad_updates
        self.bad_in_a_row = 0
        self.last_outlier = 0  # iteration in which loss or gradient last left the usual range; 0: never
        self.norms: deque[float] = deque(maxlen=_NORM_WINDOW)

    def record_finite(self) -> None:
        self.bad_in_a_row = 0

    def record_skipped(self, rollouts: RolloutBatch, *, ranks: list[int], iteration: int) -> None:
        """Record a skipped update. Raises FloatingPointError, on all ranks together, after too many in a row."""
        self.last_outlier = self.last_outlier if self.bad_in_a_row else iteration
        self.bad_in_a_row += 1
        self._save(rollouts, ranks, iteration)
        where = f"rank {', '.join(map(str, ranks))}" if ranks else "the gradient"
        message = f"skipped an update of iteration {iteration} on all ranks: NaN or inf, first on {where}"
        if self.mesh.is_main:
            print(f"\n{message}. Its rollouts are saved in {self.folder}", file=sys.stderr, flush=True)
        if self.bad_in_a_row >= self.max_bad_updates:
            raise FloatingPointError(
                f"{message}, the last of max_bad_updates={self.max_bad_updates} skipped updates in a row. "
                f"The policy is that of the last finite update. Lower learning_rate, or inspect {self.folder}"
            )

    def divergence(self, iteration: int) -> str:
        """Return a message that explains videos with NaN by divergence of the policy; empty in the first iteration."""
        if iteration == 1:
            return ""
        outlier = f"loss or gradient left the usual range in iteration {self.last_outlier}"
        sudden = f"in the update of iteration {iteration - 1}; loss and gradient were in the usual range before it"
        is_recent = 0 < self.last_outlier >= iteration - _NORM_WINDOW
        return f"The policy has diverged: {outlier if is_recent else sudden}. Lower learning_rate"

    def spike(self, norm: float, iteration: int) -> float:
        """Return the gradient norm divided by the median of previous norms, or 1 without any; warn if it is large."""
        ratio = norm / statistics.median(self.norms) if self.norms and statistics.median(self.norms) > 0 else 1.0
        self.last_outlier = iteration if ratio > _SPIKE else self.last_outlier
        if ratio > _SPIKE and self.mesh.is_main:
            print(f"\ngradient norm is {ratio:.0f} times its median over {len(self.norms)} updates", file=sys.stderr)
        self.norms.append(norm)
        return ratio

    def state_dict(self) -> dict:
        return {"bad_in_a_row": self.bad_in_a_row, "norms": list(self.norms), "strayed": self.last_outlier}

    def load_state_dict(self, state: dict) -> None:
        self.bad_in_a_row, self.last_outlier = state["bad_in_a_row"], state.get("strayed", 0)
        self.norms = deque(state["norms"], maxlen=_NORM_WINDOW)

    def _save(self, rollouts: RolloutBatch, ranks: list[int], iteration: int) -> None:
        name = f"{iteration:06d}-rank{self.mesh.rank}"
        tensors = {
            "latents": rollouts.trajectories.latents,
            "log_probs": rollouts.trajectories.log_probs,
            "visits": rollouts.trained_steps,
            "advantages": rollouts.advantages,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / f"{name}.safetensors") as partial:
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial)
            rewards = {row: reward.scores | {"total": reward.total} for row, reward in rollouts.rewards.items()}
            finite = {row: {k: or_none(v) for k, v in scores.items()} for row, scores in rewards.items()}
            write_json(self.folder / f"{name}.json", {"ranks": ranks, "prompts": rollouts.prompts, "rewards": finite})
            saved = self.folder.glob(f"*-rank{self.mesh.rank}.safetensors")
            for old in sorted(saved, key=lambda file: file.stat().st_mtime_ns)[:-_MAX_SAVED]:
                old.unlink()
                old.with_suffix(".json").unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:  # a full disk must not end the run
            print(f"\ncould not save the rollouts of the skipped update: {error}", file=sys.stderr)
