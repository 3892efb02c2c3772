"""Loading of a saved policy in one process, for sampling and export; any number of ranks may have written it.

The folder is a checkpoint of full or LoRA training, or written by ``save_pretrained``. An EMA is loaded as the policy.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.config.command_line import read_settings
from hyvideo.config.settings import FIELDS
from hyvideo.data.run_folder import CHECKPOINTS
from hyvideo.distributed.checkpoint import TENSORS, check_shapes, load_tensors, read_state
from hyvideo.distributed.checkpoint_reader import read_shapes
from hyvideo.models import loading
from hyvideo.models.family import component_of
from hyvideo.models.lora import add_lora, check_lora, read_lora, with_lora

MODEL_FILE = "model.json"
LORA_FOLDER = "lora"


def write_model_file(transformer: nn.Module, folder: Path) -> None:
    """Write the class and the configuration of the transformer beside its tensors."""
    settings = {"_class_name": component_of(transformer).class_name} | dict(transformer.config)
    settings.pop("_name_or_path", None)
    (folder / MODEL_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def check_policy(root: str | Path, version: str | None, folder: Path) -> None:
    """Raise ValueError if a folder's policy does not fit the base model. Reads only configurations and headers."""
    transformer = loading.transformer_on_meta(root, version)
    if is_lora(folder):
        check_lora(transformer, read_lora(folder / LORA_FOLDER))
    elif _is_checkpoint(folder):
        check_shapes(folder, _by_stored_name(transformer, read_shapes(folder / TENSORS)))
    else:
        loading.load_transformer_weights(transformer, _transformer_folder(folder))


def negative_prompt(folder: Path) -> str | None:
    """Return the negative prompt that the policy was trained with; None if no run wrote the folder."""
    saved = _settings(folder)
    return None if saved is None else str(saved.get("negative_prompt", ""))


def settings_of_run(folder: Path) -> tuple[dict, Path | None]:
    """Return the settings of the run that wrote a checkpoint, and their file; ({}, None) if no run wrote it.

    The file is the run's config.yaml or, if the checkpoint was moved out of the run's folder, its state.json.
    """
    if (saved := _settings(folder)) is None:
        return {}, None
    checkpoints = folder.resolve().parent
    if checkpoints.name == CHECKPOINTS and (file := checkpoints.parent / "config.yaml").is_file():
        return read_settings(file), file
    return {name: value for name, value in saved.items() if name in FIELDS}, folder / "state.json"


def _settings(folder: Path) -> dict | None:
    if not os.path.isfile(folder / "state.json"):  # Path.is_file raises OSError if the name is too long
        return None
    return read_state(folder, {"settings": {}})["settings"]


def is_lora(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of LoRA training, which needs the base model's weights."""
    return _is_checkpoint(folder) and (folder / LORA_FOLDER).is_dir()


def load_into(transformer: nn.Module, folder: Path) -> None:
    """Load the policy's weights or add its adapter to a transformer. Raises ValueError if they do not fit."""
    if is_lora(folder):
        add_lora(transformer, read_lora(folder / LORA_FOLDER))
    elif _is_checkpoint(folder):
        _fill(transformer, folder)
    else:
        loading.load_transformer_weights(transformer, _transformer_folder(folder))


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return a new transformer, loaded from a folder that has all weights of the policy."""
    if not _is_checkpoint(folder):
        return loading.load_transformer(_transformer_folder(folder), None, dtype=dtype)
    transformer = loading.transformer_from_config(folder / MODEL_FILE)
    transformer.type(dtype).to_empty(device="cpu")
    _fill(transformer, folder)
    return transformer.eval()


def load_merged(
    root: Path, version: str | None, *, checkpoint: Path | None, lora: Path | None, dtype: torch.dtype
) -> nn.Module:
    """Return the base model or a checkpoint's policy, with the checkpoint's adapter and ``lora`` merged, if any.

    LoRAs are merged in float32, which takes 33 GB of memory at full size, and rounded once. Merging into bf16 weights
    would lose most of the change, which is smaller than the spacing of bf16 numbers.
    """
    has_adapter_only = checkpoint is not None and is_lora(checkpoint)
    paths = [*([checkpoint / LORA_FOLDER] if has_adapter_only else []), *([lora] if lora else [])]
    loras = [read_lora(path) for path in paths]
    loaded_dtype = torch.float32 if loras else dtype
    if checkpoint is None or has_adapter_only:
        transformer = loading.load_transformer(root, version, dtype=loaded_dtype)
    else:
        transformer = load(checkpoint, loaded_dtype)
    for adapter in loras:
        check_lora(transformer, adapter)
        weights = with_lora(transformer.state_dict().items(), adapter)
        transformer.load_state_dict(dict(weights), assign=True)
    return transformer.type(dtype)  # diffusers' to(dtype) would warn about float32 modules


def _transformer_folder(folder: Path) -> Path:
    """Return the folder written by ``save_pretrained``: ``folder`` or one in it. Raises ValueError if there is none."""
    for candidate in (loading.find_transformer(folder), folder):
        if candidate and (candidate / "config.json").is_file():
            return candidate
    problem = "is neither; give a folder in checkpoints/" if folder.exists() else "does not exist"
    rule = "a policy must be a checkpoint of a run or a transformer folder with a config.json"
    raise ValueError(f"{rule}: {folder} {problem}")


def _fill(transformer: nn.Module, folder: Path) -> None:
    load_tensors(folder, _by_stored_name(transformer, read_shapes(folder / TENSORS)))


def _by_stored_name(transformer: nn.Module, stored: Collection[str]) -> dict[str, Tensor]:
    """Return the transformer's tensors by their names in a checkpoint: the EMA's names if it is stored."""
    return {
        f"average.{name}" if f"average.{name}" in stored else f"policy.{name}": tensor
        for name, tensor in transformer.state_dict().items()
    }


def _is_checkpoint(folder: Path) -> bool:
    return (folder / TENSORS).is_dir()
