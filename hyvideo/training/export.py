"""A trained policy for other programs: its transformer in one process, and the other parts of diffusers' pipeline."""

import json
from pathlib import Path

import torch
from torch import nn

from hyvideo.models import loading
from hyvideo.models.family import Family
from hyvideo.models.lora import add_lora, merge, read_lora
from hyvideo.training import saved_policy


def load_policy(
    root: Path, version: str | None, *, checkpoint: Path | None, lora: Path | None, dtype: torch.dtype
) -> nn.Module:
    """A base model or the policy of a checkpoint, with a LoRA merged into it if there is one, of either.

    Merging is done in float32, which takes 33 GB of memory at full size, and rounded once. Weights that are bf16
    already would swallow most of a LoRA's change: it is smaller than the distance between two bf16 numbers.

    Raises: ValueError for what is missing or does not fit.
    """
    has_adapter_alone = checkpoint is not None and saved_policy.is_lora(checkpoint)
    paths = [*([checkpoint / saved_policy.LORA_FOLDER] if has_adapter_alone else []), *([lora] if lora else [])]
    loras = [read_lora(path) for path in paths]
    loaded_dtype = torch.float32 if loras else dtype
    if checkpoint is None or has_adapter_alone:
        transformer = loading.load_transformer(root, version, dtype=loaded_dtype)
    else:
        transformer = saved_policy.load(checkpoint, loaded_dtype)
    for one in loras:
        add_lora(transformer, one)
        merge(transformer)
    return transformer.type(dtype)  # diffusers' own to(dtype) warns about float32 modules that there are none of


def share_mode(out: Path) -> None:
    """Gives weights in and below a folder the mode of the files beside them: safetensors' are for this user alone."""
    for file in out.rglob("*.safetensors"):
        file.chmod(file.with_name("config.json").stat().st_mode)


def export_other_parts(
    family: Family, root: Path, version: str | None, out: Path, *, task: str, dtype: torch.dtype
) -> None:
    """Complete ``<out>`` to a folder for diffusers' pipeline of the task, ``t2v`` or ``i2v``.

    Raises: ValueError where a part of the checkpoints in ``root`` is missing or does not fit.
    """
    import diffusers

    index = {"_class_name": family.pipelines[task], "_diffusers_version": diffusers.__version__}
    index["transformer"] = "diffusers", family.transformer.class_name
    parts = family.export_parts(root, out, version=version, task=task, dtype=dtype, load_vae=loading.load_vae)
    for name, part in parts:
        if not isinstance(part, tuple):  # the library and class of a part that is written already
            part.save_pretrained(out / name)
            part = type(part).__module__.partition(".")[0], type(part).__name__
        index[name] = part
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
