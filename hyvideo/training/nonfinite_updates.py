"""Updates whose loss or gradient is not finite: skipped by all ranks, counted, and kept to be looked at.

bad_updates/000012-rank0.safetensors    what this rank trained on: latents, log-probabilities, trained steps, advantages
bad_updates/000012-rank0.json           prompts, rewards, and which ranks had the first bad number

The newest three of each rank stay.
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
_REMEMBERED = 50  # gradient norms that a new one is compared with
_SPIKE = 10.0
_KEPT = 3  # bad updates of a rank, the newest


class NonFiniteUpdates:
    """Counts skipped updates, of which ``max_bad_updates`` in a row end the run; compares gradient norms."""

    def __init__(self, output_dir: Path, mesh: Mesh, *, max_bad_updates: int):
        self.folder, self.mesh, self.max_bad_updates = output_dir / FOLDER, mesh, max_bad_updates
        self.bad_in_a_row = 0
        self.strayed = 0  # iteration in which loss or gradient last left their range; 0 for none
        self.norms: deque[float] = deque(maxlen=_REMEMBERED)

    def good(self) -> None:
        self.bad_in_a_row = 0

    def bad(self, rollouts: RolloutBatch, *, ranks: list[int], iteration: int) -> None:
        """An update was skipped. Raises FloatingPointError, on all ranks alike, when there were too many in a row."""
        self.strayed = self.strayed if self.bad_in_a_row else iteration
        self.bad_in_a_row += 1
        self._keep(rollouts, ranks, iteration)
        where = f"rank {', '.join(map(str, ranks))}" if ranks else "the gradient only"
        message = f"an update of iteration {iteration} is not finite, first on {where}; it was skipped on all ranks"
        if self.mesh.is_main:
            print(f"\n{message} and its rollouts are kept in {self.folder}", file=sys.stderr, flush=True)
        if self.bad_in_a_row >= self.max_bad_updates:
            raise FloatingPointError(
                f"{message}, and so were the {self.max_bad_updates - 1} before it (max_bad_updates). The policy is "
                f"that of the last good update. Lower learning_rate, or look at what is kept in {self.folder}"
            )

    def divergence(self, iteration: int) -> str:
        """The sentence on a policy whose videos are not finite in ``iteration``; none before the first update."""
        if iteration == 1:
            return ""
        seen = f"loss or gradient left the usual range in iteration {self.strayed}"
        unseen = f"by the update of iteration {iteration - 1}, before which loss and gradient were in the usual range"
        is_recent = 0 < self.strayed >= iteration - _REMEMBERED
        return f"The policy has diverged: {seen if is_recent else unseen}. Lower learning_rate"

    def spike(self, norm: float, iteration: int) -> float:
        """The gradient's norm in units of the median of those before it; 1 for the first. Warns of a large one."""
        ratio = norm / statistics.median(self.norms) if self.norms and statistics.median(self.norms) > 0 else 1.0
        self.strayed = iteration if ratio > _SPIKE else self.strayed
        if ratio > _SPIKE and self.mesh.is_main:
            print(f"\nthe gradient is {ratio:.0f} times the median of the last {len(self.norms)}", file=sys.stderr)
        self.norms.append(norm)
        return ratio

    def state_dict(self) -> dict:
        return {"bad_in_a_row": self.bad_in_a_row, "norms": list(self.norms), "strayed": self.strayed}

    def load_state_dict(self, state: dict) -> None:
        self.bad_in_a_row, self.strayed = state["bad_in_a_row"], state.get("strayed", 0)
        self.norms = deque(state["norms"], maxlen=_REMEMBERED)

    def _keep(self, rollouts: RolloutBatch, ranks: list[int], iteration: int) -> None:
        name = f"{iteration:06d}-rank{self.mesh.rank}"
        tensors = {
            "latents": rollouts.trajectories.latents,
            "log_probs": rollouts.trajectories.log_probs,
            "visits": rollouts.trained_steps,
            "advantages": rollouts.advantages,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / f"{name}.safetensors") as aside:
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, aside)
            rewards = {row: reward.scores | {"total": reward.total} for row, reward in rollouts.rewards.items()}
            finite = {row: {k: or_none(v) for k, v in of.items()} for row, of in rewards.items()}
            write_json(self.folder / f"{name}.json", {"ranks": ranks, "prompts": rollouts.prompts, "rewards": finite})
            mine = self.folder.glob(f"*-rank{self.mesh.rank}.safetensors")
            for old in sorted(mine, key=lambda file: file.stat().st_mtime_ns)[:-_KEPT]:
                old.unlink()
                old.with_suffix(".json").unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:  # a full disk is no reason to end what can go on
            print(f"\nthe rollouts of the skipped update could not be kept: {error}", file=sys.stderr)
