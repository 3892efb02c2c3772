"""State of a run: the contents of a checkpoint, and the settings that may change on resume.

Settings that affect rollouts, rewards, loss or updates may change only with
``allow_changed_settings``.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyvideo.config.config import TRAITS, Config
from hyvideo.config.identity import Changes, changed_settings, named_files
from hyvideo.distributed import checkpoint_loading, manifest
from hyvideo.distributed.checkpoint_writer import CheckpointWriter
from hyvideo.distributed.collectives import any_rank, raise_on_all_ranks
from hyvideo.models.lora import save_lora
from hyvideo.training.policy import Policy
from hyvideo.training.policy_update import PolicyUpdate
from hyvideo.training.sampler_check import Coefficients, check_resumed_steps
from hyvideo.training.saved_policy import LORA_FOLDER, write_model_file

# Entries of state.json that are needed to resume, and those that earlier versions did not write.
STATE = {
    "iteration": int,
    "update": int,
    "anchor_age": int,
    "kl_coefficient": {"value": float, "num_updates": int, "recent": [float]},
    "health": {"bad_in_a_row": int, "norms": [float]},
    "settings": {},
}
IMAGES = "ref_image_path"  # key in `contents` for the images of the prompts
WEIGHTS = "pretrained_model_root"  # prefix in `contents` of the models that the run starts from
REWARD_WEIGHTS = "reward_model/"  # prefix in `contents` of the weights of the scorers
SERVICE = "remote_reward_url"  # key in `contents` of the scorer of the reward service
OPTIONAL_STATE = {"unvalidated": {"*": (float, list)}, "rollouts": int, "contents": {"*": str}}


class Progress:
    """Current iteration and stage: calls ``on_stage(stage, iteration)`` and
    ``show(stage, iteration, part)``.
    """

    def __init__(self, on_stage: Callable[[str, int], None], show: Callable[[str, int, str], None]):
        self.iteration = 0
        self.stage = ""
        self._on_stage = on_stage
        self._show = show

    def enter(self, stage: str, part: str = "") -> None:
        """Report that the run enters a stage of the current iteration, or a ``part`` of it."""
        self.stage = stage
        self._part = part
        self._on_stage(stage, self.iteration)
        self._show(stage, self.iteration, part)

    def steps(
        self, schedule: Sequence[int], check: Callable[[], None] = lambda: None
    ) -> Iterator[int]:
        """Yield the sampler's steps and report each as a part of the stage; ``check``, called
        before it, may raise.
        """
        for number, step in enumerate(schedule, 1):
            check()
            self._on_stage(self.stage, self.iteration)
            self._show(self.stage, self.iteration, f"{self._part}, step {number}/{len(schedule)}")
            yield step


class RunState:
    """State that a run needs to resume bit for bit, saved to and loaded from checkpoints."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        update: PolicyUpdate,
        checkpoints: CheckpointWriter,
        progress: Progress,
        *,
        num_rollouts: int,  # per iteration, over all replicas
        # hashes of the files named in settings, at the start of the run
        contents: Mapping[str, str],
        custom_steps: Coefficients | None = None,  # of a custom sampler
    ):
        self.config = config
        self.policy = policy
        self.update = update
        self.checkpoints = checkpoints
        self.progress = progress
        self.num_rollouts = num_rollouts
        self.contents = contents
        self.custom_steps = custom_steps or []
        self.saved_iteration = 0
        self._saved_at = time.monotonic()
        # metrics of an iteration whose validation is not finished
        self.unvalidated: dict[str, float] = {}
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

    def mark_finished(self, unvalidated: Mapping[str, float]) -> None:
        """Record that the current iteration is finished; ``unvalidated`` are its metrics before the
        validation.
        """
        self.unvalidated = dict(unvalidated)
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
        counters = counters or self._counters()
        state = {
            "iteration": counters["iteration"],  # last finished iteration
            "update": counters["update"],  # optimizer updates so far
            "anchor_age": counters["anchor_age"],  # updates since the anchor was refreshed
            # value, number of updates, recent KL values
            "kl_coefficient": counters["kl_coefficient"],
            "health": counters["health"],  # recent gradient norms and skipped updates
            # metrics of the iteration, if its validation is not finished
            "unvalidated": self.unvalidated,
            "rollouts": self.num_rollouts,  # per iteration, over all replicas
            "settings": self.config.flat(),  # all settings by name
            "contents": self.contents,  # hashes of the files that settings name
        }
        if self.custom_steps:
            # a, b and std of each step of a custom sampler
            state["custom_steps"] = self.custom_steps
        lora = None
        if self.policy.is_lora:
            with self.policy.with_ema_weights():
                lora = self.policy.lora()

        def write_files(folder: Path) -> None:
            write_model_file(self.policy.transformer, folder)
            if lora:
                save_lora(lora, folder / LORA_FOLDER)

        self.saved_iteration, self._saved_at = self.progress.iteration, time.monotonic()
        return self.checkpoints.save(
            self.progress.iteration, self.policy.tensors(), state, write_files
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

    def resume(self, folder: Path | None) -> bool:
        """Load a checkpoint and return whether one was given.

        Raises ValueError if it does not fit the settings.
        """
        if folder is None:
            return False
        with raise_on_all_ranks(self.checkpoints.mesh, errors=(ValueError, OSError)):
            state = checkpoint_loading.read_state(folder, needed=STATE, optional=OPTIONAL_STATE)
            digest = manifest.manifest_hash(folder)
        checkpoint_loading.require_same_checkpoint(
            state["iteration"], digest, self.checkpoints.mesh
        )
        settings, same_rollouts = (
            self.config.flat(),
            state.get("rollouts") in (None, self.num_rollouts),
        )
        changes = changed_settings(state["settings"], settings, same_rollouts=same_rollouts)
        saved_contents = state.get("contents", {})
        changes.affecting_learning.extend(changed_contents(saved_contents, self.contents, settings))
        if not self.config.record.allow_changed_settings:
            check_changes(changes)
        if "custom_steps" in state and not changes.affecting_learning:
            check_resumed_steps(self.config.rollout, state["custom_steps"], self.custom_steps)
        self.changed_settings = changes.free + changes.affecting_learning
        # only with allow_changed_settings: otherwise the checkpoint has the anchor of anchor_path
        replaces_anchor = state["settings"].get("anchor_path", "") != settings[
            "anchor_path"
        ] or saved_contents.get("anchor_path") != self.contents.get("anchor_path")
        self.policy.load(folder, state["anchor_age"], replaces_anchor=replaces_anchor)
        self.update.kl_coefficient.load_state_dict(state["kl_coefficient"])
        self.update.nonfinite.load_state_dict(state["health"])
        self.progress.iteration = self.saved_iteration = state["iteration"]
        self.update.update_count = state["update"]
        self.mark_finished(state.get("unvalidated", {}))
        if self.progress.iteration >= self.config.optimizer.max_steps and not self.unvalidated:
            raise ValueError(
                "max_steps must be greater than the iteration of the checkpoint: got "
                f"max_steps={self.config.optimizer.max_steps} and iteration "
                f"{self.progress.iteration}; increase max_steps"
            )
        return True


# Settings whose files are read after the hashes of all files are taken.
READ_LATE = ("pretrained_lora_path", "anchor_path", "reward_config")


def hash_files(settings: Mapping[str, Any], only: Collection[str] | None = None) -> dict[str, str]:
    """Return hashes of the files that affect training, keyed by the setting that names them; of
    all settings, or of those in ``only``.
    """
    return {
        name: hashlib.blake2b(b"".join(path.read_bytes() for path in paths)).hexdigest()
        for name, paths in named_files(settings).items()
        if TRAITS[name].decides == "learning" and (only is None or name in only)
    }


def changed_contents(
    saved: Mapping[str, str], now: Mapping[str, str], settings: Mapping[str, Any]
) -> list[str]:
    """Return a message for each setting whose files have changed since the hashes were saved."""
    names = [name for name, digest in now.items() if saved.get(name, digest) != digest]
    files = named_files(settings) if names else {}
    messages = []
    for name in names:
        if name == IMAGES:
            messages.append(f"images of the prompts, in the column {IMAGES}, have changed")
        elif name.startswith(f"{WEIGHTS}/"):
            model = name.removeprefix(f"{WEIGHTS}/")
            messages.append(
                f"the weights of the base model ({model}) in {WEIGHTS} {settings[WEIGHTS]} have "
                "changed"
            )
        elif name.startswith(REWARD_WEIGHTS):
            model = name.removeprefix(REWARD_WEIGHTS)
            messages.append(f"the weights of reward_model {model} have changed")
        elif name == SERVICE:
            messages.append(
                f"the reward model of the service at {SERVICE} {settings[SERVICE]} has changed: "
                "another class, other options or other weights"
            )
        else:
            paths = ", ".join(map(str, files[name]))
            messages.append(f"the contents of {name} {paths} have changed")
    return messages


def require_unchanged(contents: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a file that is read while the run loads has changed since it was hashed,
    because the run may then have read another file than its checkpoints record.
    """
    now = hash_files(settings, only=READ_LATE)
    if changed := changed_contents(contents, now, settings):
        raise ValueError(
            f"{'; '.join(changed)} while the run was loading; start it again when no program "
            "writes these files"
        )


def check_changes(changes: Changes) -> None:
    """Raise ValueError if settings that affect learning have changed."""
    if changes.affecting_learning:
        raise ValueError(
            "the checkpoint was written with other settings:\n  "
            + "\n  ".join(changes.affecting_learning)
            + "\nRestore them (the config.yaml of the run has them), start a new run in another "
            "output_dir, or set "
            "allow_changed_settings true"
        )
