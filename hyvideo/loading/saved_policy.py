"""Loading of a saved policy in one process, for sampling and export; any number of ranks may have
written it.

The folder is a checkpoint of full or LoRA training, or written by ``save_pretrained``. An EMA is
loaded as the policy. Every function that reads weights first compares a checkpoint with its
digests, as a resume does.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.checkpoints.format import (
    LORA,
    MODEL,
    is_checkpoint,
    is_lora,
    no_policy,
    verify,
    write_model,
)
from hyvideo.checkpoints.loading import check_shapes, load_tensors, stored_shapes
from hyvideo.checkpoints.state import sampled_name
from hyvideo.loading.run_settings import check_trained_expert
from hyvideo.models import loading
from hyvideo.models.family import component_of
from hyvideo.models.guidance import Expert
from hyvideo.models.lora import Lora, add_lora, fit_lora, with_lora
from hyvideo.models.lora_files import check_expert, read_lora


def write_model_file(transformer: nn.Module, folder: Path) -> None:
    """Write the class and the configuration of the transformer beside its tensors."""
    settings = {"_class_name": component_of(transformer).class_name} | dict(transformer.config)
    settings.pop("_name_or_path", None)
    write_model(folder, settings)


def read_saved_lora(
    path: Path,
    expert: Expert | None = None,
    *,
    setting: str = "expert",
    ignore_expert: bool = False,
) -> Lora:
    """Return a LoRA, also of a checkpoint, for an ``expert`` or a single transformer.

    Raises ValueError as `verify`, `check_expert` and `read_lora` do.
    """
    verify(path)
    lora = read_lora(path, expert)
    if not ignore_expert:
        check_expert(path, expert, setting=setting)
    return lora


def check_policy(
    root: str | Path, version: str | None, folder: Path, expert: Expert | None = None
) -> None:
    """Raise ValueError if a folder's policy is corrupted or does not fit the base model."""
    verify(folder)
    check_trained_expert(folder, expert)
    transformer = loading.transformer_on_meta(root, version, expert)
    if is_lora(folder):
        fit_lora(transformer, read_saved_lora(folder / LORA, expert))
    elif is_checkpoint(folder):
        check_shapes(folder, _by_stored_name(transformer, stored_shapes(folder)))
    else:
        loading.load_transformer_weights(transformer, _transformer_folder(folder, expert))


def load_into(transformer: nn.Module, folder: Path, expert: Expert | None = None) -> None:
    """Load the policy's weights or add its adapter to a transformer, of two the one of ``expert``.

    Raises ValueError if they do not fit.
    """
    verify(folder)
    if is_lora(folder):
        add_lora(transformer, read_lora(folder / LORA))
    elif is_checkpoint(folder):
        _fill(transformer, folder)
    else:
        loading.load_transformer_weights(transformer, _transformer_folder(folder, expert))


def load(folder: Path, dtype: torch.dtype, expert: Expert | None = None) -> nn.Module:
    """Return a new transformer, loaded from a folder that has all weights of the policy."""
    if not is_checkpoint(folder):
        return loading.load_transformer(_transformer_folder(folder, expert), None, dtype=dtype)
    verify(folder)
    transformer = loading.transformer_from_config(folder / MODEL)
    transformer.type(dtype).to_empty(device="cpu")
    _fill(transformer, folder)
    return transformer.eval()


def load_merged(
    root: Path,
    version: str | None,
    *,
    checkpoint: Path | None,
    lora: Path | None,
    dtype: torch.dtype,
    expert: Expert | None = None,
    ignore_expert: bool = False,
    bases: Iterable[Lora] = (),
) -> nn.Module:
    """Return the base model with the LoRAs ``bases``, or a checkpoint's policy, with the
    checkpoint's adapter and ``lora`` merged, if any.

    LoRAs are merged in float32, tensor by tensor, and rounded once. Merging into bf16 weights would
    lose most of the change, which is smaller than the spacing of bf16 numbers.
    """
    if checkpoint is not None:
        verify(checkpoint)
        check_trained_expert(checkpoint, expert)
    has_adapter_only = checkpoint is not None and is_lora(checkpoint)
    paths = []
    if has_adapter_only:
        paths.append(checkpoint / LORA)
    if lora:
        paths.append(lora)
    loras = [read_saved_lora(path, expert, ignore_expert=ignore_expert) for path in paths]
    if checkpoint is None or has_adapter_only:
        for adapter in loras:  # `with_lora` ignores names that the model does not have
            fit_lora(loading.transformer_on_meta(root, version, expert), adapter)
        loras = [*bases, *loras]
        return loading.load_transformer(root, version, expert=expert, dtype=dtype, loras=loras)
    transformer = load(checkpoint, torch.float32 if loras else dtype, expert)
    for adapter in loras:
        fit_lora(transformer, adapter)
        weights = with_lora(transformer.state_dict().items(), adapter)
        transformer.load_state_dict(dict(weights), assign=True)
    return transformer.type(dtype)  # diffusers' to(dtype) would warn about float32 modules


def has_expert(folder: Path, expert: Expert) -> bool:
    """Return whether a folder that no run wrote has a transformer of its own for an expert."""
    return not is_checkpoint(folder) and loading.find_transformer(folder, None, expert) is not None


def _transformer_folder(folder: Path, expert: Expert | None = None) -> Path:
    """Return the folder written by ``save_pretrained``: ``folder`` or one in it, of two the one of
    ``expert``.

    Raises ValueError if there is none.
    """
    for candidate in (loading.find_transformer(folder, expert=expert), folder):
        if candidate and (candidate / "config.json").is_file():
            return candidate
    raise no_policy(folder)


def _fill(transformer: nn.Module, folder: Path) -> None:
    load_tensors(folder, _by_stored_name(transformer, stored_shapes(folder)))


def _by_stored_name(transformer: nn.Module, stored: Collection[str]) -> dict[str, Tensor]:
    """Return the transformer's tensors by their names in a checkpoint."""
    return {sampled_name(name, stored): tensor for name, tensor in transformer.state_dict().items()}


def stored_names(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the names of parameters in a checkpoint, by their names in the transformer."""
    stored = stored_shapes(folder)
    return {name: sampled_name(name, stored) for name in names}
