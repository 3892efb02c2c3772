"""Checkpoints: written aside, made visible by one rename, and everything needed to go on.

    checkpoints/000010/transformer/      weights in float32, as diffusers' ``from_pretrained`` reads them
    checkpoints/000010/anchor.safetensors  only if the anchor differs from the policy
    checkpoints/000010/optimizer.pt
    checkpoints/000010/state.json        counters, anchor's age, adaptive coefficient, settings
    checkpoints/latest                   name of the newest complete one

Random state is not stored: it is derived from seed and iteration.
"""

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.models.loading import check_transformer_weights, load_transformer_weights

FOLDER = "checkpoints"
LATEST = "latest"


@dataclass(frozen=True)
class TrainingState:
    """What a run knows besides the policy's weights."""

    state: dict  # JSON: counters and small values
    optimizer: dict
    anchor: dict[str, Tensor] | None  # None where it equals the policy, or there is none


def save(output_dir: Path, iteration: int, transformer: nn.Module, training: TrainingState, *, keep: int) -> Path:
    """Writes the checkpoint of ``iteration``, then drops the oldest beyond ``keep`` (0 keeps all)."""
    root = output_dir / FOLDER
    target = root / name_of(iteration)
    aside = root / f".{target.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    transformer.save_pretrained(aside / "transformer")
    if training.anchor is not None:
        save_file(
            {name: tensor.contiguous() for name, tensor in training.anchor.items()},
            aside / "anchor.safetensors",
        )
    torch.save(training.optimizer, aside / "optimizer.pt")
    (aside / "state.json").write_text(json.dumps(training.state, indent=2))
    if target.exists():
        _remove(target)
    os.rename(aside, target)
    _point_latest_at(root, target.name)
    others = [path for path in complete(output_dir) if path != target]
    for old in others[: max(0, len(others) - (keep - 1))] if keep else []:
        _remove(old)
    return target


def load(folder: Path, device: torch.device) -> TrainingState:
    """The training state of a checkpoint. Raises ValueError where a file is missing or broken."""
    try:
        state = json.loads((folder / "state.json").read_text())
        optimizer = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
    except (OSError, json.JSONDecodeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} is not a complete checkpoint: {error}") from error
    anchor_file = folder / "anchor.safetensors"
    return TrainingState(state, optimizer, load_file(anchor_file) if anchor_file.is_file() else None)


def load_policy(transformer: nn.Module, folder: Path) -> None:
    """Puts a checkpoint's weights into the transformer, strictly."""
    load_transformer_weights(transformer, policy_folder(folder))


def check_policy(root: str | Path, version: str | None, folder: Path) -> None:
    """Raises ValueError where a checkpoint's weights are not those of the base model's shape; reads headers only."""
    check_transformer_weights(root, version, policy_folder(folder))


def policy_folder(folder: Path) -> Path:
    """Where a checkpoint has the transformer, or the folder itself if it is one."""
    for candidate in (folder / "transformer", folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise ValueError(
        f"a checkpoint is a folder with `transformer` in it, or a transformer's own with a config.json; got {folder}"
    )


def find(output_dir: Path, wanted: str) -> Path | None:
    """The checkpoint that ``resume_from_checkpoint`` names, or None where ``latest`` finds none yet.

    Raises: ValueError for a folder that is not a checkpoint.
    """
    if wanted != LATEST:
        if not (Path(wanted) / "state.json").is_file():
            raise ValueError(f"resume_from_checkpoint must be `latest` or a checkpoint folder, got {wanted!r}")
        return Path(wanted)
    found = complete(output_dir)
    pointer = output_dir / FOLDER / LATEST
    named = output_dir / FOLDER / pointer.read_text().strip() if pointer.is_file() else None
    if named in found:
        return named
    return found[-1] if found else None


def drop_after(output_dir: Path, iteration: int) -> None:
    """Removes what a run left after ``iteration``, which is being resumed: it will be made again, differently."""
    for parent in (FOLDER, "samples", "rollouts"):
        for path in (output_dir / parent).glob("[0-9]*"):
            if path.name.isdigit() and int(path.name) > iteration:
                _remove(path)


def complete(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. What is incomplete has not been renamed, and is not seen."""
    root = output_dir / FOLDER
    return sorted(path for path in root.glob("[0-9]*") if (path / "state.json").is_file())


def name_of(iteration: int) -> str:
    return f"{iteration:06d}"


def _remove(folder: Path) -> None:
    """Hides the folder by one rename first: a crash in between must not leave half a checkpoint that looks whole."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def _point_latest_at(root: Path, name: str) -> None:
    aside = root / f".{LATEST}.partial"
    aside.write_text(name + "\n")
    os.replace(aside, root / LATEST)
