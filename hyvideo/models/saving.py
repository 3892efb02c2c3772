"""Transformer and VAE to a folder in the original layout, whole or without the tensors that are drawn again."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hyvideo.data.outside import replacing
from hyvideo.models.loading import TRANSFORMER, VAE, WEIGHTS_STEM, Component, setting_problems
from hyvideo.models.weight_files import Folder, draw_tensor, refuse, seed_for


def save_transformer_original(
    transformer: nn.Module,
    folder: str | Path,
    *,
    drawn: Mapping[str, int] | Iterable[tuple[str, int]] = (),
    dtype: torch.dtype = torch.float16,
    config_extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the transformer to `folder` (``root/transformer/<version>``) in the original layout.

    Args:
        drawn: Prefix of original tensor names -> seed. These tensors are left out of the file; they must be
            what `draw_tensor` gives for the seed, as in a model loaded with that ``random_weights_seed``.
        config_extra: More keys for config.json; they may say anything that does not change the model.

    Raises:
        ValueError: The original layout cannot express the model, a tensor to leave out is not the drawn one,
            or a weight is too large for `dtype`.
    """
    _save(TRANSFORMER, transformer, Path(folder), dict(drawn), dtype, config_extra or {})


def save_vae_original(
    vae: nn.Module,
    folder: str | Path,
    *,
    drawn: Mapping[str, int] | Iterable[tuple[str, int]] = (),
    dtype: torch.dtype = torch.float16,
    config_extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the VAE to `folder` (``root/vae``) in the original layout; as `save_transformer_original`."""
    _save(VAE, vae, Path(folder), dict(drawn), dtype, config_extra or {})


def _save(
    component: Component,
    model: nn.Module,
    folder: Path,
    drawn: dict[str, int],
    dtype: torch.dtype,
    config_extra: Mapping[str, Any],
) -> None:
    config = component.config_to_original(model.config) | dict(config_extra)
    target = Folder(folder, f"saving {component.class_name}")
    refuse(target, setting_problems(model.config, component.config_to_diffusers(config)))
    tensors = {}
    for name, tensor in component.to_original(model.state_dict()).items():
        seed = seed_for(name, drawn)
        if seed is None:
            tensors[name] = _stored(name, tensor, dtype)
        elif not torch.equal(tensor.cpu(), draw_tensor(seed, name, tuple(tensor.shape)).to(tensor.dtype)):
            raise ValueError(f"tensor {name!r} is not what seed {seed} draws; take its prefix out of drawn")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    metadata = {"format": "pt"} | ({"drawn": json.dumps(drawn)} if drawn else {})
    # The file may be the one that is being read, here or in another process.
    with replacing(folder / f"{WEIGHTS_STEM}.safetensors") as path:
        save_file(tensors, path, metadata=metadata)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    if not stored.isfinite().all():
        raise ValueError(f"tensor {name!r} has values that are not finite in {dtype}; save with dtype=torch.float32")
    return stored
