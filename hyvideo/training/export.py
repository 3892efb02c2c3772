"""Export of a trained policy as a diffusers pipeline: the transformer and the other components."""

import json
from pathlib import Path

import torch
from torch import nn

from hyvideo.models import loading
from hyvideo.models.family import Family
from hyvideo.models.lora import check_lora, read_lora, with_lora
from hyvideo.training import saved_policy


def load_policy(
    root: Path, version: str | None, *, checkpoint: Path | None, lora: Path | None, dtype: torch.dtype
) -> nn.Module:
    """Return the base model or a checkpoint's policy, with the checkpoint's adapter and ``lora`` merged, if any.

    LoRAs are merged in float32, which takes 33 GB of memory at full size, and rounded once. Merging into bf16 weights
    would lose most of the change, which is smaller than the spacing of bf16 numbers.
    """
    has_adapter_only = checkpoint is not None and saved_policy.is_lora(checkpoint)
    paths = [*([checkpoint / saved_policy.LORA_FOLDER] if has_adapter_only else []), *([lora] if lora else [])]
    loras = [read_lora(path) for path in paths]
    loaded_dtype = torch.float32 if loras else dtype
    if checkpoint is None or has_adapter_only:
        transformer = loading.load_transformer(root, version, dtype=loaded_dtype)
    else:
        transformer = saved_policy.load(checkpoint, loaded_dtype)
    for adapter in loras:
        check_lora(transformer, adapter)
        weights = with_lora(transformer.state_dict().items(), adapter)
        transformer.load_state_dict(dict(weights), assign=True)
    return transformer.type(dtype)  # diffusers' to(dtype) would warn about float32 modules


def copy_permissions(out: Path) -> None:
    """Copy the permissions of config.json to the weight files beside it, which safetensors makes private."""
    for file in out.rglob("*.safetensors"):
        file.chmod(file.with_name("config.json").stat().st_mode)


def export_components(
    family: Family, root: Path, version: str | None, out: Path, *, task: str, dtype: torch.dtype
) -> None:
    """Write all components of a diffusers pipeline except the transformer to ``out``; ``task`` is t2v or i2v."""
    import diffusers

    index = {"_class_name": family.pipelines[task], "_diffusers_version": diffusers.__version__}
    index["transformer"] = "diffusers", family.transformer.class_name
    parts = family.export_parts(root, out, version=version, task=task, dtype=dtype, load_vae=loading.load_vae)
    for name, part in parts:
        if not isinstance(part, tuple):  # a tuple has the library and class of a component that is already written
            part.save_pretrained(out / name)
            part = type(part).__module__.partition(".")[0], type(part).__name__
        index[name] = part
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
