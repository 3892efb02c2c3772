"""The state of a run: what a checkpoint holds, and which settings may differ where it is taken up.

What is about the machine, the records or the layout may change. What the rollouts, rewards, loss or updates depend on
may not, unless ``allow_changed_settings`` is set.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyvideo.config.identity import Changes, changed_settings, named_files
from hyvideo.config.settings import TRAITS, Config
from hyvideo.distributed import checkpoint, manifest
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.collectives import anywhere, failing_together
from hyvideo.models.lora import save_lora
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.saved_policy import LORA_FOLDER, write_model_file

# Needed of state.json, to go on with.
STATE = {"iteration": int, "update": int, "anchor_age": int, "kl_coefficient": dict, "health": dict, "settings": dict}


class Progress:
    """The iteration that the run is in; reports stage and iteration to ``on_stage``, and with the part to ``show``."""

    def __init__(self, on_stage: Callable[[str, int], None], show: Callable[[str, int, str], None]):
        self.iteration, self._on_stage, self._show = 0, on_stage, show

    def enter(self, stage: str, part: str = "") -> None:
        """Reports a stage of the current iteration, or a ``part`` of it."""
        self._stage, self._part = stage, part
        self._on_stage(stage, self.iteration)
        self._show(stage, self.iteration, part)

    def steps(self, schedule: Sequence[int]) -> Iterator[int]:
        """Goes through the steps of the sampler and shows each."""
        for number, step in enumerate(schedule, 1):
            self._show(self._stage, self.iteration, f"{self._part}, step {number}/{len(schedule)}")
            yield step


class RunState:
    """Everything that a run needs to go on as if it had not stopped: written to checkpoints, and read from them."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        update: PolicyUpdate,
        checkpoints: CheckpointWriter,
        progress: Progress,
        *,
        num_rollouts: int,  # of an iteration, over all replicas
        contents: Mapping[str, str],  # hashes, at the start, of the files that settings name
    ):
        self.config, self.policy, self.update = config, policy, update
        self.checkpoints, self.progress = checkpoints, progress
        self.num_rollouts, self.contents = num_rollouts, contents
        self.saved_iteration, self._saved_at = 0, time.monotonic()
        self.unvalidated: dict[str, float] = {}  # metrics of an iteration that only its validation may be missing of
        self.changed_settings: list[str] = []  # since the checkpoint that this run goes on from

    def is_old(self) -> bool:
        """Claims, on all ranks alike, that the last checkpoint was begun ``save_minutes`` ago, if that is set."""
        minutes, mesh = self.config.record.save_minutes, self.checkpoints.mesh
        return minutes > 0 and anywhere(mesh.is_main and time.monotonic() - self._saved_at >= 60 * minutes, mesh)

    def save(self) -> Path:
        """Begins to write a checkpoint of the run as it stands; every rank calls it."""
        self.progress.enter("save", "a checkpoint")
        anchor = self.policy.anchor
        state = {
            "iteration": self.progress.iteration,
            "update": self.update.update_count,
            "anchor_age": anchor.age if anchor else 0,
            "kl_coefficient": self.update.kl_coefficient.state_dict(),
            "health": self.update.nonfinite.state_dict(),
            "unvalidated": self.unvalidated,
            "rollouts": self.num_rollouts,
            "settings": self.config.flat(),
            "contents": self.contents,
        }
        lora = None
        if self.policy.is_lora:
            with self.policy.as_average():
                lora = self.policy.lora()

        def write_files(folder: Path) -> None:
            write_model_file(self.policy.transformer, folder)
            if lora:
                save_lora(lora, folder / LORA_FOLDER)

        self.saved_iteration, self._saved_at = self.progress.iteration, time.monotonic()
        return self.checkpoints.save(self.progress.iteration, self.policy.tensors(), state, write_files)

    def save_unfinished(self) -> None:
        """Saves the last finished iteration, if need be; one that was begun is made again. Every rank calls it."""
        self.policy.optimizers.drop_gradients()
        self.progress.iteration -= not self.unvalidated
        self.checkpoints.wait()
        if self.progress.iteration > self.saved_iteration or self.checkpoints.last_failed:
            self.save()
        self.checkpoints.wait()

    def resume(self, folder: Path | None) -> bool:
        """Takes a checkpoint up; claims that there was one. Raises ValueError where the run would become another."""
        if folder is None:
            return False
        with failing_together(self.checkpoints.mesh, errors=(ValueError, OSError)):
            state, made = checkpoint.read_state(folder, needed=STATE), manifest.own_hash(folder)
        checkpoint.refuse_different(state["iteration"], made, self.checkpoints.mesh)  # whose tensors may differ
        settings, same_rollouts = self.config.flat(), state.get("rollouts") in (None, self.num_rollouts)
        changes = changed_settings(state["settings"], settings, same_rollouts=same_rollouts)
        changes.of_the_method.extend(changed_contents(state.get("contents", {}), self.contents, settings))
        if not self.config.record.allow_changed_settings:
            refuse_changes(changes)
        self.changed_settings = changes.free + changes.of_the_method
        self.policy.load(folder, state["anchor_age"])
        self.update.kl_coefficient.load_state_dict(state["kl_coefficient"])
        self.update.nonfinite.load_state_dict(state["health"])
        self.progress.iteration = self.saved_iteration = state["iteration"]
        self.update.update_count = state["update"]
        self.unvalidated = state.get("unvalidated", {})
        if self.progress.iteration >= self.config.optimizer.max_steps and not self.unvalidated:
            raise ValueError(
                f"max_steps must be above the iteration to resume after, got {self.config.optimizer.max_steps} and "
                f"{self.progress.iteration}; raise max_steps"
            )
        return True


def contents(settings: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of the files that decide what is learned, by the setting that names them."""
    return {
        name: hashlib.blake2b(b"".join(path.read_bytes() for path in paths)).hexdigest()
        for name, paths in named_files(settings).items()
        if TRAITS[name].decides == "learning"
    }


def changed_contents(saved: Mapping[str, str], now: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
    """Sentences on files, by the setting that names them, whose hashes are not those that were saved."""
    changed = {name: named_files(settings)[name] for name, digest in now.items() if saved.get(name, digest) != digest}
    return [f"the contents of {name} {', '.join(map(str, paths))} have changed" for name, paths in changed.items()]


def refuse_changes(changes: Changes) -> None:
    """Raises ValueError where the run would become another one."""
    if changes.of_the_method:
        raise ValueError(
            "the run to resume was made with other settings:\n  "
            + "\n  ".join(changes.of_the_method)
            + "\nrestore them, start a new run in another output_dir, or set allow_changed_settings"
        )
