"""The parts of a checkpoint folder: where each lies, which files it needs, what for, and where it comes from.

Original layout and diffusers layout have different parts; the reward and the metrics lie beside either.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hyvideo.data.outside import parse_json
from hyvideo.models.download_check import fit
from hyvideo.models.versions import PIPELINE_TASKS, RELEASED, UNSUPPORTED

Use = Literal["t2v", "i2v", "quoted text", "reward", "metrics"]

_WEIGHTS = "diffusion_pytorch_model.safetensors"
_TRANSFORMERS_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZER = (("tokenizer_config.json",), ("tokenizer.json", "vocab.json"))


@dataclass(frozen=True)
class Part:
    """One thing to download. Paths are below the checkpoint folder."""

    name: str
    folder: str
    files: tuple[tuple[str, ...], ...]  # all of these are needed; of each tuple's patterns one is enough
    fits: Callable[[Path], list[str]]  # what in the headers does not fit, once the files are whole
    uses: tuple[Use, ...]  # a part without uses holds nothing up
    hub: str
    hub_files: tuple[str, ...] = ()  # of the hub's repository; all of it where there are none
    hub_folder: str | None = None  # where the repository's top goes; the part's folder where it is None
    from_modelscope: bool = False
    size: str = ""  # on the hub, where it is known

    @property
    def is_transformer(self) -> bool:
        return self.folder.split("/")[0] == "transformer"

    def command(self, root: Path) -> str:
        """The download, for a shell."""
        folder = self.folder if self.hub_folder is None else self.hub_folder
        target = shlex.quote(str(root / folder))
        if self.from_modelscope:
            return f"modelscope download --model {self.hub} --local_dir {target}"
        patterns = "".join(f' --include "{name}"' if "*" in name else f" {name}" for name in self.hub_files)
        return f"hf download {self.hub}{patterns} --local-dir {target}"


def parts_of(root: Path) -> list[Part]:
    """The parts to look for, after the layout that is there; the original one where nothing tells."""
    is_diffusers = (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file()
    own = _diffusers_parts(root) if is_diffusers else _original_parts(root)
    return [*own, *_shared_parts()]


def _original_parts(root: Path) -> list[Part]:
    found = sorted(path.name for path in (root / "transformer").glob("*") if path.is_dir())
    versions = [*found, *(name for name in _started(root) if name not in found)]
    # One version of each task is named where there is none.
    for task in ("t2v", "i2v"):
        if not any(_task(root, name) == task for name in versions):
            versions.append(f"480p_{task}")
    hub = "tencent/HunyuanVideo-1.5"
    return [
        *(_transformer(root, name, hub) for name in versions),
        Part(
            "VAE",
            "vae",
            (("config.json",), (_WEIGHTS,)),
            fit.vae_problems,
            ("t2v", "i2v"),
            hub,
            ("vae/*",),
            "",
            size="5.04 GB",
        ),
        Part(
            "text encoder (Qwen2.5-VL)",
            "text_encoder/llm",
            (("config.json",), _TRANSFORMERS_WEIGHTS, *_TOKENIZER),
            fit.text_encoder_problems,
            ("t2v", "i2v"),
            "Qwen/Qwen2.5-VL-7B-Instruct",
            size="16.6 GB",
        ),
        Part(
            "ByT5 (config, tokenizer)",
            "text_encoder/byt5-small",
            (("config.json",), ("tokenizer_config.json",)),
            fit.nothing,
            ("quoted text",),
            "google/byt5-small",
            ("config.json", "tokenizer_config.json", "special_tokens_map.json"),
            size="6 kB",
        ),
        Part(
            "glyph encoder",
            "text_encoder/Glyph-SDXL-v2",
            (
                ("assets/color_idx.json",),
                ("assets/multilingual_10-lang_idx.json",),
                ("checkpoints/byt5_model.pt",),
            ),
            fit.glyph_encoder_problems,
            ("quoted text",),
            "AI-ModelScope/Glyph-SDXL-v2",
            from_modelscope=True,
        ),
        Part(
            "image encoder (SigLIP)",
            "vision_encoder/siglip",
            (
                ("image_encoder/config.json",),
                ("image_encoder/model.safetensors",),
                ("feature_extractor/preprocessor_config.json",),
            ),
            fit.vision_encoder_problems,
            ("i2v",),
            "black-forest-labs/FLUX.1-Redux-dev",
            (
                "image_encoder/config.json",
                "image_encoder/model.safetensors",
                "feature_extractor/preprocessor_config.json",
            ),
            size="0.86 GB, gated: accept its licence and set HF_TOKEN",
        ),
        Part(
            "scheduler",
            "scheduler",
            (("scheduler_config.json",),),
            fit.nothing,
            (),
            hub,
            ("scheduler/*",),
            "",
        ),
    ]


def _transformer(root: Path, name: str, hub: str) -> Part:
    return Part(
        f"transformer {name}",
        f"transformer/{name}",
        (("config.json",), (_WEIGHTS,)),
        partial(_version_problems, version=name),
        (_task(root, name),),
        hub,
        (f"transformer/{name}/*",),
        "",
        size="33.3 GB",
    )


def _version_problems(root: Path, version: str) -> list[str]:
    if version in UNSUPPORTED:
        return [f"this version is not supported: {UNSUPPORTED[version]}"]
    return fit.transformer_problems(root, version)


def _diffusers_parts(root: Path) -> list[Part]:
    pipeline = _word(root / "model_index.json", "_class_name")
    task = PIPELINE_TASKS.get(pipeline) or _task_of_config(root / "transformer" / "config.json") or "t2v"
    hub = f"hunyuanvideo-community/HunyuanVideo-1.5-480p_{task}"

    def part(name: str, folder: str, files: tuple, fits: Callable[[Path], list[str]], *uses: Use) -> Part:
        return Part(name, folder, files, fits, uses, hub, (f"{folder}/*",), "")

    weights = (("config.json",), (_WEIGHTS, f"{_WEIGHTS}.index.json"))
    transformers_weights = (("config.json",), _TRANSFORMERS_WEIGHTS)
    return [
        part("transformer", "transformer", weights, partial(fit.transformer_problems, version=None), task),
        part("VAE", "vae", weights, fit.vae_problems, "t2v", "i2v"),
        part("text encoder", "text_encoder", transformers_weights, fit.text_encoder_problems, "t2v", "i2v"),
        part("tokenizer", "tokenizer", _TOKENIZER, fit.nothing, "t2v", "i2v"),
        part("glyph encoder", "text_encoder_2", transformers_weights, fit.glyph_encoder_problems, "quoted text"),
        part("tokenizer of ByT5", "tokenizer_2", (("tokenizer_config.json",),), fit.nothing, "quoted text"),
        part("image encoder", "image_encoder", transformers_weights, fit.vision_encoder_problems, "i2v"),
        part("feature extractor", "feature_extractor", (("preprocessor_config.json",),), fit.nothing, "i2v"),
    ]


def _shared_parts() -> list[Part]:
    clip_files = ("config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json", "vocab.json")
    clip_files = (*clip_files, "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
    clip_needs = (("config.json",), ("model.safetensors",), ("preprocessor_config.json",), *_TOKENIZER)
    return [
        Part(
            "VideoAlign",
            "VideoReward",
            (
                ("model_config.json",),
                # The released layout, or an adapter over Qwen2-VL.
                ("checkpoint-*/model.pth", "checkpoint-*/adapter_model.safetensors"),
                ("checkpoint-*/model.pth", "checkpoint-*/non_lora_state_dict.pth"),
                ("checkpoint-*/tokenizer/tokenizer.json", "checkpoint-*/adapter_config.json"),
            ),
            fit.videoalign_problems,
            ("reward",),
            "KlingTeam/VideoReward",
            size="5.03 GB",
        ),
        Part(
            "CLIP",
            "clip/clip-vit-large-patch14",
            clip_needs,
            partial(fit.clip_problems, folder="clip/clip-vit-large-patch14"),
            ("metrics",),
            "openai/clip-vit-large-patch14",
            clip_files,
            size="1.71 GB",
        ),
        Part(
            "PickScore",
            "clip/PickScore_v1",
            clip_needs,
            partial(fit.clip_problems, folder="clip/PickScore_v1"),
            ("metrics",),
            "yuvalkirstain/PickScore_v1",
            clip_files,
            size="3.94 GB",
        ),
    ]


def _started(root: Path) -> list[str]:
    """Versions of which nothing is there but an unfinished download."""
    return sorted(path.name for path in (root / ".cache/huggingface/download/transformer").glob("*") if path.is_dir())


def _task(root: Path, name: str) -> Literal["t2v", "i2v"]:
    if name in RELEASED:
        return RELEASED[name].task
    return _task_of_config(root / "transformer" / name / "config.json") or ("i2v" if "i2v" in name else "t2v")


def _task_of_config(path: Path) -> Literal["t2v", "i2v"] | None:
    """What a config says its transformer is for, in the original's word or in diffusers'."""
    task = _word(path, "ideal_task", "task_type")
    return task if task in ("t2v", "i2v") else None


def _word(path: Path, *keys: str) -> str | None:
    """What the first of the keys that a JSON file has says, where that is a string."""
    try:
        content = parse_json(path.read_text())
    except (OSError, ValueError):  # its part says so
        return None
    said = next((content[key] for key in keys if content.get(key)), None) if isinstance(content, dict) else None
    return said if isinstance(said, str) else None
