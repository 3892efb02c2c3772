"""Saving of the transformer and VAE in the original layout, optionally without tensors that a seed
reproduces.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from hyvideo.data.files import publish
from hyvideo.models.family import component_of
from hyvideo.models.loading import WEIGHTS_STEM, setting_problems
from hyvideo.models.names import Rename
from hyvideo.models.weight_files import Folder, draw_tensor, raise_problems, seed_for


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
    raise_problems(target, setting_problems(model.config, component.config_to_diffusers(config)))
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
        elif not torch.equal(
            tensor.cpu(), draw_tensor(seed, name, tuple(tensor.shape)).to(tensor.dtype)
        ):
            raise ValueError(
                f"tensor {name!r} differs from the values of seed {seed}. Remove its prefix from "
                "drawn"
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    metadata = {"format": "pt"}
    if drawn:
        metadata["drawn"] = json.dumps(drawn)
    # This or another process may be reading the existing file.
    with publish(folder / f"{WEIGHTS_STEM}.safetensors") as path:
        save_file(tensors, path, metadata=metadata)
