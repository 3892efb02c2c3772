"""State of a run: when it is saved, how it is taken from the run and given back, and what may change
when a run is resumed.

Settings and inputs that affect rollouts, rewards, loss or updates may change only if
``allow_changed_settings`` names them.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyvideo.checkpoints.format import LORA
from hyvideo.checkpoints.state import State
from hyvideo.checkpoints.writer import CheckpointWriter
from hyvideo.distributed.collectives import any_rank
from hyvideo.loading.input_digests import changed_inputs
from hyvideo.loading.saved_policy import write_model_file
from hyvideo.models.lora_saving import save_lora
from hyvideo.settings.config import Config
from hyvideo.settings.identity import changed_settings
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.progress import Progress

ALL = "all"  # in allow_changed_settings


class RunState:
    """State that a run needs to resume bit for bit, saved to and loaded from checkpoints."""

    def __init__(
        self,
        config: Config,
        update: PolicyUpdate,
        checkpoints: CheckpointWriter,
        progress: Progress,
        *,
        num_rollouts: int,  # per iteration, over all replicas
        inputs: Mapping[str, str],  # digests of what the run reads, by setting
    ):
        self.config = config
        self.policy = update.policy
        self.update = update
        self.checkpoints = checkpoints
        self.progress = progress
        self.num_rollouts = num_rollouts
        self.inputs = dict(inputs)
        self.saved_iteration = 0
        self._saved_at = time.monotonic()
        self.metrics: dict[str, float] = {}  # of the last finished iteration
        self.changed_settings: list[str] = []  # relative to the checkpoint that was resumed
        self.mark_finished({})

    def is_save_due(self) -> bool:
        """Return whether the last checkpoint is older than ``save_minutes``; the same on all ranks.

        Collective.
        """
        minutes, mesh = self.config.record.save_minutes, self.checkpoints.mesh
        return minutes > 0 and any_rank(
            mesh.is_main and time.monotonic() - self._saved_at >= 60 * minutes, mesh
        )

    def mark_finished(self, metrics: Mapping[str, float]) -> None:
        """Record that the current iteration is finished, with its metrics before the validation."""
        self.metrics = dict(metrics)
        self._finished = self._counters()
        self._steps_begun = self.update.steps_begun

    def _counters(self) -> dict:
        """Return the small values of the state that training changes."""
        return {
            "iteration": self.progress.iteration,
            "update": self.update.update_count,
            "anchor_age": self.policy.anchor.age if self.policy.anchor else 0,
            "kl_coefficient": self.update.kl_coefficient.state_dict(),
            "health": self.update.nonfinite.state_dict(),
        }

    def save(self, counters: dict | None = None) -> Path:
        """Start writing a checkpoint and return its folder; ``counters`` replace the current ones.

        Collective.
        """
        self.progress.enter("save", "a checkpoint")
        state = State(
            run=self.checkpoints.run,
            metrics=self.metrics,
            rollouts=self.num_rollouts,
            settings=self.config.flat(),
            inputs=self.inputs,
            **(counters or self._counters()),
        )
        lora = None
        if self.policy.is_lora:
            with self.policy.with_ema_weights():
                lora = self.policy.lora()

        def write_files(folder: Path) -> None:
            write_model_file(self.policy.transformer, folder)
            if lora:
                save_lora(lora, folder / LORA, expert=self.policy.config.trained_expert)

        self.saved_iteration, self._saved_at = self.progress.iteration, time.monotonic()
        return self.checkpoints.save(
            self.progress.iteration, self.policy.tensors(), asdict(state), write_files
        )

    def save_last_finished(self) -> int | None:
        """Save the last finished iteration unless it is saved, and return it; an unfinished one is
        discarded.

        Returns None if an optimizer step of the unfinished iteration has already changed the
        weights. Collective.
        """
        self.policy.optimizers.zero_grad()
        self.checkpoints.wait()
        has_changed = self.update.steps_begun != self._steps_begun
        self.progress.iteration = self._finished["iteration"]
        if self.progress.iteration > self.saved_iteration or self.checkpoints.last_failed:
            if has_changed:
                return None
            self.save(self._finished)
        self.checkpoints.wait()
        return self.progress.iteration

    def resume(self, folder: Path, state: State) -> None:
        """Load a checkpoint with its ``state``, which all ranks have read from the same file.

        Raises ValueError if it does not fit the settings or inputs. Collective.
        """
        settings = self.config.flat()
        self.changed_settings = check_changes(
            state.settings,
            state.inputs,
            settings,
            self.inputs,
            same_rollouts=state.rollouts == self.num_rollouts,
        )
        # only if the change was accepted: otherwise the checkpoint has the anchor of anchor_path
        replaces_anchor = state.settings.get("anchor_path", "") != settings["anchor_path"]
        replaces_anchor |= state.inputs.get("anchor_path") != self.inputs.get("anchor_path")
        self.policy.load(folder, state.anchor_age, replaces_anchor=replaces_anchor)
        self.update.kl_coefficient.load_state_dict(state.kl_coefficient)
        self.update.nonfinite.load_state_dict(state.health)
        self.progress.iteration = state.iteration
        self.saved_iteration = state.iteration
        self.update.update_count = state.update
        self.mark_finished(state.metrics)


def check_changes(
    saved_settings: Mapping[str, Any],
    saved_inputs: Mapping[str, str],
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    same_rollouts: bool,
) -> list[str]:
    """Return descriptions of what has changed since the run was saved.

    Raises ValueError for changes that affect learning, unless ``allow_changed_settings`` has their
    names.
    """
    changes = changed_settings(saved_settings, settings, same_rollouts=same_rollouts)
    affecting = dict(changes.affecting_learning)
    for name in changed_inputs(saved_inputs, inputs):
        value = settings.get(name.partition("/")[0], "")
        path = ", ".join(value) if isinstance(value, list) else value
        affecting[name] = f"the contents of {name} have changed ({path})"
    allowed = settings["allow_changed_settings"]
    refused = [name for name in affecting if name not in allowed and ALL not in allowed]
    if refused:
        raise ValueError(
            "the run was started with other settings or inputs:\n  "
            + "\n  ".join(affecting[name] for name in refused)
            + "\nRestore them (config.yaml in output_dir has the settings), start a new run in "
            "another output_dir, or accept them by name: --allow_changed_settings "
            + " ".join(refused)
        )
    return [*changes.free.values(), *affecting.values()]
