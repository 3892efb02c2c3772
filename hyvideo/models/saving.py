"""Saving of the transformer and VAE in the original layout, optionally without tensors that a seed
reproduces.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from hyvideo.files.files import publish
from hyvideo.models.family import component_of
from hyvideo.models.loading import WEIGHTS_STEM
from hyvideo.weights.names import Rename
from hyvideo.weights.weight_files import Folder, raise_problems, seed_for


def save_original(
    model: nn.Module,
    folder: Path,
    *,
    drawn: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float16,
    rename: Rename | None = None,
) -> None:
    """Save a model to `folder` (``root/transformer/<version>`` or ``root/vae``) in the original
    layout, or with the names that ``rename`` returns for its state dict.

    ``drawn`` maps prefixes of original tensor names to the seeds of `draw_tensor`; these tensors
    are omitted from the file. Raises ValueError if the original layout cannot represent the model,
    or a weight overflows `dtype`.
    """
    component = component_of(model)
    drawn = dict(drawn or {})
    config = component.config_to_original(model.config)
    target = Folder(folder, f"saving {component.class_name}")
    restored = component.config_to_diffusers(config)
    problems = [
        f"{key} is {value!r} in the model and {restored.get(key)!r} in the original's config.json"
        for key, value in model.config.items()
        if not key.startswith("_") and _comparable(value) != _comparable(restored.get(key))
    ]
    raise_problems(target, problems)
    tensors = {}
    for name, tensor in (rename or component.to_original)(model.state_dict()).items():
        seed = seed_for(name, drawn)
        if seed is None:
            tensors[name] = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
            if not tensors[name].isfinite().all():
                raise ValueError(
                    f"tensor {name!r} has values that are not finite in {dtype}. Save with "
                    "dtype=torch.float32"
                )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    metadata = {"format": "pt"}
    if drawn:
        metadata["drawn"] = json.dumps(drawn)
    # This or another process may be reading the existing file.
    with publish(folder / f"{WEIGHTS_STEM}.safetensors") as path:
        save_file(tensors, path, metadata=metadata)


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
