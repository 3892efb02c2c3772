"""The policy of a checkpoint in one process, whatever number of ranks wrote it: to sample from, or to export.

A folder may be a checkpoint of full training, one of LoRA training, which has the adapter alone, or a transformer's own
as ``save_pretrained`` writes it. Where a run kept a running average, the average is its policy.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.config.command_line import read_settings
from hyvideo.config.settings import FIELDS
from hyvideo.distributed.checkpoint import FOLDER, TENSORS, check_shapes, load_tensors, read_state
from hyvideo.distributed.checkpoint_reader import read_shapes
from hyvideo.models import loading
from hyvideo.models.family import component_of
from hyvideo.models.lora import add_lora, check_lora, read_lora

MODEL_FILE = "model.json"
LORA_FOLDER = "lora"


def write_model_file(transformer: nn.Module, folder: Path) -> None:
    """Writes what the transformer is, beside its tensors."""
    settings = {"_class_name": component_of(transformer).class_name} | dict(transformer.config)
    settings.pop("_name_or_path", None)
    (folder / MODEL_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def check_policy(root: str | Path, version: str | None, folder: Path) -> None:
    """Raises ValueError where a folder's policy is not one of the base model's shape; reads descriptions only."""
    transformer = loading.transformer_without_memory(root, version)
    if is_lora(folder):
        check_lora(transformer, read_lora(folder / LORA_FOLDER))
    elif _is_checkpoint(folder):
        check_shapes(folder, _by_stored_name(transformer, read_shapes(folder / TENSORS)))
    else:
        loading.load_transformer_weights(transformer, _transformer_folder(folder))


def negative_prompt(folder: Path) -> str | None:
    """The negative prompt that a checkpoint's policy was trained with; None for a folder that is not of a run."""
    saved = _settings(folder)
    return None if saved is None else str(saved.get("negative_prompt", ""))


def settings_of_run(folder: Path) -> tuple[dict, Path | None]:
    """Settings of the run that made a checkpoint and the file that has them; empty and None where no run made it.

    The file is the run's config.yaml, and the checkpoint's own state.json where it was moved away from the run.
    """
    if (saved := _settings(folder)) is None:
        return {}, None
    checkpoints = folder.resolve().parent
    if checkpoints.name == FOLDER and (file := checkpoints.parent / "config.yaml").is_file():
        return read_settings(file), file
    return {name: value for name, value in saved.items() if name in FIELDS}, folder / "state.json"


def _settings(folder: Path) -> dict | None:
    if not os.path.isfile(folder / "state.json"):  # not the method: that raises for a name that is too long
        return None
    return read_state(folder, {"settings": dict})["settings"]


def is_lora(folder: Path) -> bool:
    """Claims that a folder is a checkpoint with an adapter alone: `load_into` leaves the base model's weights."""
    return _is_checkpoint(folder) and (folder / LORA_FOLDER).is_dir()


def load_into(transformer: nn.Module, folder: Path) -> None:
    """Gives a transformer the policy's weights, or adds its adapter. Raises ValueError where they do not fit."""
    if is_lora(folder):
        add_lora(transformer, read_lora(folder / LORA_FOLDER))
    elif _is_checkpoint(folder):
        _fill(transformer, folder)
    else:
        loading.load_transformer_weights(transformer, _transformer_folder(folder))


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A transformer of its own with the policy's weights, of a folder that has them all."""
    if not _is_checkpoint(folder):
        return loading.load_transformer(_transformer_folder(folder), None, dtype=dtype)
    transformer = loading.transformer_of(folder / MODEL_FILE)
    transformer.type(dtype).to_empty(device="cpu")
    _fill(transformer, folder)
    return transformer.eval()


def _transformer_folder(folder: Path) -> Path:
    """Folder of a transformer as ``save_pretrained`` writes it, in a folder or that itself."""
    for candidate in (loading.find_transformer(folder), folder):
        if candidate and (candidate / "config.json").is_file():
            return candidate
    raise ValueError(
        "a policy is a checkpoint of a run, or a transformer's own folder with a config.json; "
        f"{folder} {'is neither (name one in its checkpoints/)' if folder.exists() else 'is not there'}"
    )


def _fill(transformer: nn.Module, folder: Path) -> None:
    load_tensors(folder, _by_stored_name(transformer, read_shapes(folder / TENSORS)))


def _by_stored_name(transformer: nn.Module, stored: Collection[str]) -> dict[str, Tensor]:
    """The transformer's tensors by their names in a checkpoint: those of the average where it is there."""
    return {
        f"average.{name}" if f"average.{name}" in stored else f"policy.{name}": tensor
        for name, tensor in transformer.state_dict().items()
    }


def _is_checkpoint(folder: Path) -> bool:
    return (folder / TENSORS).is_dir()
