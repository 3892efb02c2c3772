"""What an iteration did, as numbers: one line of audit.jsonl, from which `scripts.audit` recomputes
what the other files of a run say.

    rollouts   group, member, prompt, first number of the noise, scores, reward and advantage of each
    schedule   noise levels, standard deviation and equalizer weight of each step
    evaluations  samples that passed through the transformers of the first replica
    updates    for each update: the rollouts in it, learning rate, KL, coefficient and gradient norm
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal

from hyvideo.distributed.collectives import all_objects
from hyvideo.distributed.mesh import Mesh
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.objective import Terms
from hyvideo.training.rollout_batch import RolloutBatch


class Ledger:
    """Collects what the updates of an iteration do, and returns it with the rollouts as a line."""

    def __init__(
        self,
        content: Literal["none", "numbers", "all"],
        mesh: Mesh,
        *,
        group_size: int,
        boundary: float | None,  # noise level between two experts
    ):
        self.content = content
        self.boundary = boundary
        self.mesh = mesh
        self.group_size = group_size
        self._updates: list[dict[str, Any]] = []
        self._passes: list[dict[str, Any]] = []  # of the current update

    def add_pass(
        self, rollouts: RolloutBatch, rows: Sequence[int], column: int, terms: Terms
    ) -> None:
        """Record the loss terms of a pass, with ``record all``."""
        if self.content != "all":
            return
        values = {name: _numbers(value.double().tolist()) for name, value in terms.metrics.items()}
        trained = rollouts.trained_steps[rows, column].tolist()
        self._passes.append(
            {
                "rollout": self._numbers_of(rollouts, rows),
                "trained": _numbers(trained),
                "loss": _numbers(terms.loss.tolist()),
                "kl": _numbers(terms.kl.tolist()),
                "values": values,
            }
        )

    def add_update(
        self, rollouts: RolloutBatch, rows: Sequence[int], values: dict[str, float | None]
    ) -> None:
        """Record an update on ``rows`` of this replica and its ``values``, equal on all ranks."""
        update: dict[str, Any] = {"rollouts": self._numbers_of(rollouts, rows)}
        update |= {name: _number(value) for name, value in values.items()}
        if self._passes:
            update["passes"] = self._passes
        self._passes = []
        self._updates.append(update)

    def line(
        self,
        rollouts: RolloutBatch,
        iteration: int,
        weights: Sequence[float] | None,
        evaluations: Counter[str],
    ) -> dict[str, Any] | None:
        """Return the line of an iteration and begin the next one; None with ``record none``.
        Collective.

        ``weights``: factor of the policy term at each denoising step; None for objectives on noise
        levels. Shape: (steps,). ``evaluations``: samples that passed through the transformers of
        this replica in the iteration.
        """
        updates, self._updates = self._updates, []
        if self.content == "none":
            return None
        gathered = all_objects((self._rollouts(rollouts), updates), self.mesh)
        by_number: dict[int, dict[str, Any]] = {}
        for entry in chain.from_iterable(entries for entries, _ in gathered):
            # the ranks of a replica have the same rollouts and share the scoring
            by_number[entry["number"]] = by_number.get(entry["number"], {}) | entry
        entries = [by_number[number] for number in sorted(by_number)]
        names = list(dict.fromkeys(chain.from_iterable(entries)))
        return {
            "iteration": iteration,
            "rollouts": {name: [entry.get(name) for entry in entries] for name in names},
            "schedule": _schedule(rollouts.schedule, weights) | {"boundary": self.boundary},
            "evaluations": dict(evaluations),
            "updates": [_merged(parts) for parts in zip(*(each for _, each in gathered))],
        }

    def _numbers_of(self, rollouts: RolloutBatch, rows: Sequence[int]) -> list[int]:
        return [rollouts.indices[row].number(self.group_size) for row in rows]

    def _rollouts(self, rollouts: RolloutBatch) -> list[dict[str, Any]]:
        """Return what is recorded of each rollout of this replica."""
        latents = rollouts.trajectories.latents
        noise: list[float | None] = [None] * len(rollouts)
        if latents.shape[1] > 1:  # else only the latents of given videos
            noise = latents[:, 0].flatten(1)[:, 0].tolist()
        advantages = rollouts.advantages.tolist()
        entries = []
        for row, index in enumerate(rollouts.indices):
            entry: dict[str, Any] = {
                "number": index.number(self.group_size),
                "group": index.group,
                "member": index.member,
                "prompt": prompt_digest(rollouts.prompts[row]),
                "noise": _number(noise[row]),
                "advantage": _number(advantages[row]),
            }
            if rollouts.videos:
                entry["video"] = rollouts.videos[row]
            if reward := rollouts.rewards.get(row):  # scored by this rank
                entry["reward"] = _number(reward.total)
                if reward.asked:
                    entry["asked"] = [prompt_digest(reward.asked[0]), reward.asked[1]]
                entry |= {
                    f"score/{name}": _number(value)
                    for name, value in reward.scores.items()
                    if isinstance(value, int | float)
                }
            if self.content == "all":
                entry["trained"] = _numbers(rollouts.trained_steps[row].tolist())
            entries.append(entry)
        return entries


def prompt_digest(prompt: str) -> str:
    """Return the digest by which a line names a prompt: 8 bytes of blake2b of its UTF-8 text."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


def _schedule(schedule: Schedule, weights: Sequence[float] | None) -> dict[str, list]:
    values = {
        "sigmas": _numbers(schedule.sigmas),
        "std": _numbers(step.std for step in schedule.transitions),
    }
    if weights is not None:
        values["weights"] = _numbers(weights)
    return values


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an update with the rollouts and passes of all ranks, each once."""
    rollouts = sorted({number for part in parts for number in part["rollouts"]})
    passes = []
    seen = set()
    for each in chain.from_iterable(part.get("passes", []) for part in parts):
        key = (*each["rollout"], *each["trained"])
        if key not in seen:  # the ranks of a replica make the same passes
            seen.add(key)
            passes.append(each)
    return parts[0] | {"rollouts": rollouts} | ({"passes": passes} if passes else {})


def _numbers(values: Iterable) -> list[float | int | None]:
    return [_number(value) for value in values]


def _number(value: float | int | bool | None) -> float | int | None:
    """Return a number with the nine digits that determine a float32; None if it is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None
