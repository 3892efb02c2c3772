"""A trained policy for other programs: its transformer in one process, and the other parts of diffusers' pipeline."""

import json
import shutil
from pathlib import Path

import torch
from torch import nn

from hyvideo.models import loading
from hyvideo.models.hunyuan_video15 import encoders
from hyvideo.models.lora import add_lora, merge, read_lora
from hyvideo.models.versions import PIPELINE_TASKS, version_defaults
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


def export_other_parts(root: Path, version: str | None, out: Path, *, task: str, dtype: torch.dtype) -> None:
    """Completes ``<out>`` to a folder for diffusers' pipeline of the task, ``t2v`` or ``i2v``.

    Raises: ValueError where a part of the checkpoints in ``root`` is missing or does not fit.
    """
    import diffusers

    defaults = version_defaults(version)
    shift, guidance_scale = (defaults.shift, defaults.guidance_scale) if defaults else (5.0, 6.0)
    # In bf16 decoding is off by eight times as much as in fp16, in which runs decode, and the original.
    vae_dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    loaders = {  # of one or two parts, which are let go of before the next come
        ("scheduler",): lambda: [diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)],
        ("guider",): lambda: [diffusers.ClassifierFreeGuidance(guidance_scale=guidance_scale)],
        ("vae",): lambda: [loading.load_vae(root, dtype=vae_dtype)],
        ("tokenizer", "text_encoder"): lambda: encoders.load_text_encoder(root, dtype=dtype),
        ("tokenizer_2", "text_encoder_2"): lambda: encoders.load_glyph_encoder(root),
    }
    name = next(name for name, its_task in PIPELINE_TASKS.items() if its_task == task)
    index = {"_class_name": name, "_diffusers_version": diffusers.__version__}
    index["transformer"] = "diffusers", loading.TRANSFORMER.class_name
    if task == "i2v":
        loaders["image_encoder",] = lambda: encoders.load_vision_encoder(root, dtype=dtype)[1:]
        # Copied, not loaded: transformers' processor of this name needs torchvision.
        given, copied = encoders.preprocessor_file(root), out / "feature_extractor"
        copied.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(given, copied / given.name)
        index["feature_extractor"] = "transformers", "SiglipImageProcessor"
    for names, load in loaders.items():
        for name, part in zip(names, load()):
            part.save_pretrained(out / name)
            index[name] = type(part).__module__.partition(".")[0], type(part).__name__
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
