"""The released files of VideoAlign: settings, tokenizer and weights, in both of their forms.

    VideoReward/model_config.json
    VideoReward/checkpoint-11352/model.pth                      everything; no other weights are needed
    VideoReward/checkpoint-11352/{adapter_model.safetensors, non_lora_state_dict.pth}    on top of Qwen2-VL-2B's weights
    VideoReward/checkpoint-11352/tokenizer/                     or that of the base model

Names of tensors changed between releases of transformers; both generations are understood and mapped to
``Qwen2VLModel`` of transformers 5.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hyvideo.models.reward_models.rewards import DIMENSIONS, is_finite
from hyvideo.models.reward_models.videoalign.preprocessing import MIN_PIXELS
from hyvideo.models.reward_models.videoalign.prompt import TEMPLATES
from hyvideo.models.weight_files import read_json, read_pickle, read_safetensors, shortened

LABEL = "VideoAlign"
CheckpointMode = Literal["auto", "v1", "v2", "v3"]

# Qwen2-VL-2B-Instruct, for users who have the released file and not the base model.
QWEN2_VL_2B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1536,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
_BASE_NAME = "Qwen/Qwen2-VL-2B-Instruct"


@dataclass(frozen=True)
class Settings:
    """Settings of model_config.json: how clips are looked at and scores are scaled."""

    fps: float
    num_frames: int | None
    max_pixels: int
    min_pixels: int
    template: str
    has_lora: bool
    lora_rank: int
    lora_scale: float
    normalisation: dict[str, float] | None  # <dimension>_mean and _std


@dataclass(frozen=True)
class Weights:
    """Tensors under the names of Qwen2VLModel; a LoRA pair is ``<module>.lora_A.weight`` and ``lora_B``."""

    model: dict[str, Tensor]
    lora: dict[str, Tensor]
    head: Tensor  # (1, hidden)


@dataclass(frozen=True)
class Checkpoint:
    """Paths of the parts, and the settings."""

    folder: Path  # checkpoint-<step>
    base: Path | None  # of the base model, if it is there
    settings: Settings

    @property
    def tokenizer(self) -> Path:
        folder = self.folder / "tokenizer"
        if folder.is_dir():
            return folder
        if self.base is None:
            raise ValueError(f"{LABEL}: no tokenizer in {folder}, and no base model to take it from; download it again")
        return self.base


def find_checkpoint(root: str | Path, *, step: int | None = None, base: str | Path | None = None) -> Checkpoint:
    """The newest checkpoint below ``root``, or that of a step.

    Args:
        base: Folder of Qwen2-VL-2B-Instruct; looked for beside ``root`` where it is not given.

    Raises:
        ValueError: Something is missing, or the settings ask for what this scorer does not do.
    """
    root = Path(root)
    config = read_json(root / "model_config.json", LABEL)
    steps = {int(p.name.rpartition("-")[2]): p for p in root.glob("checkpoint-*") if p.name[11:].isdigit()}
    if not steps:
        raise ValueError(f"{LABEL}: no folder checkpoint-<step> in {root}; download it again")
    if step is not None and step not in steps:
        raise ValueError(f"{LABEL}: {root} has no checkpoint of step {step}, it has {sorted(steps)}")
    folder = steps[max(steps) if step is None else step]
    try:
        settings = _read_settings(config, root / "model_config.json")
        base_name = config["model_config"]["model_name_or_path"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{LABEL}: {root / 'model_config.json'} is incomplete or damaged ({error!r})") from error
    return Checkpoint(folder, _find_base(root, base_name, base), settings)


def read_weights(checkpoint: Checkpoint, *, mode: CheckpointMode = "auto") -> Weights:
    """The tensors of a checkpoint, memory-mapped where the file allows it.

    Args:
        mode: The reference's word for how names are mapped: v1 and v3 are for files of older transformers, as the
            released one, v2 for newer ones. ``auto`` finds out; another mode must be the right one.

    Raises:
        ValueError: A file is missing or damaged, or its names are not those of the mode.
    """
    whole = checkpoint.folder / "model.pth"
    tensors = read_pickle(whole, LABEL) if whole.is_file() else _adapter_on_base(checkpoint)
    is_new = any(".language_model." in name or name.startswith("language_model.") for name in tensors)
    if mode != "auto" and is_new != (mode == "v2"):
        names = "v2 (newer transformers)" if is_new else "v1 or v3 (older transformers)"
        raise ValueError(f"reward_checkpoint_mode {mode} does not fit {checkpoint.folder}, whose names are of {names}")
    mapped = {_plain_name_of(name): tensor for name, tensor in tensors.items()}
    head, output = mapped.pop("rm_head.weight", None), mapped.pop("lm_head.weight", None)
    if head is None:
        raise ValueError(f"{LABEL}: no tensor rm_head.weight in {checkpoint.folder}; it is no reward model")
    embedding = "language_model.embed_tokens.weight"
    if output is not None and not torch.equal(output, mapped.get(embedding, output)):
        # The two are one tensor in the model; the original loads this one last.
        mapped[embedding] = output
    lora = {name: tensor for name, tensor in mapped.items() if ".lora_" in name}
    _refuse_other_lora(lora, checkpoint)
    return Weights({name: tensor for name, tensor in mapped.items() if name not in lora}, lora, head)


def base_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of the base model; that of Qwen2-VL-2B where the folder is not there."""
    return dict(QWEN2_VL_2B) if checkpoint.base is None else read_json(checkpoint.base / "config.json", LABEL)


def _read_settings(config: dict[str, Any], path: Path) -> Settings:
    if missing := [key for key in ("data_config", "model_config", "peft_lora_config") if key not in config]:
        raise ValueError(f"{LABEL}: {path} has no {', '.join(missing)}")
    data, model, lora = config["data_config"], config["model_config"], config["peft_lora_config"]
    needed = {
        "sample_type": (data.get("sample_type", "uniform"), "uniform"),
        "use_special_tokens": (model.get("use_special_tokens"), True),
        "reward_token": (model.get("reward_token"), "special"),
        "output_dim": (model.get("output_dim"), 1),
    }
    template = data.get("prompt_template_type")
    if template not in TEMPLATES:
        raise ValueError(f"{LABEL}: {path} asks for the prompt {template!r}, there are {', '.join(TEMPLATES)}")
    if wrong := [f"{name} {got!r}, not {needed!r}" for name, (got, needed) in needed.items() if got != needed]:
        raise ValueError(f"{LABEL}: {path} asks for what this scorer does not do: {'; '.join(wrong)}")
    constants = config.get("inference_config") or {}
    names = [f"{name}_{kind}" for name in DIMENSIONS for kind in ("mean", "std")] if constants else []
    if bad := [n for n in names if not is_finite(constants, n) or (n.endswith("std") and constants[n] <= 0)]:
        raise ValueError(f"{LABEL}: {path} has no usable constant {', '.join(bad)}; download it again")
    # Absent settings have the original's defaults.
    has_lora, rank = lora.get("lora_enable", False), lora.get("lora_r", 16)
    scale = lora.get("lora_alpha", 32) / (math.sqrt(rank) if lora.get("use_rslora") else rank)
    return Settings(
        fps=float(data.get("fps") or 2.0),
        num_frames=data.get("num_frames"),
        max_pixels=int(data["max_frame_pixels"]),
        min_pixels=int(data.get("min_frame_pixels", MIN_PIXELS)),
        template=template,
        has_lora=has_lora,
        lora_rank=rank,
        lora_scale=scale,
        normalisation=constants or None,
    )


def _refuse_other_lora(lora: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises ValueError where the settings and the file disagree on whether there is a LoRA, or half of one is there.

    Otherwise the scores would change without any sign of it.
    """
    if bool(lora) != checkpoint.settings.has_lora:
        setting, has = ("false", "has a LoRA") if lora else ("true", "has no LoRA")
        raise ValueError(f"{LABEL}: model_config.json says lora_enable {setting}, and {checkpoint.folder} {has}")
    swap = {".lora_A.": ".lora_B.", ".lora_B.": ".lora_A."}
    partners = {name.replace(side, other) for name in lora for side, other in swap.items() if side in name}
    if missing := sorted(partners - lora.keys()):
        raise ValueError(f"{LABEL}: the LoRA is not whole, {checkpoint.folder} lacks {', '.join(shortened(missing))}")


def _find_base(root: Path, name: str, given: str | Path | None) -> Path | None:
    """A folder with the base model's config.json; None where the built-in settings of Qwen2-VL-2B serve."""
    short = Path(name).name
    folders = [Path(given)] if given else [root / short, root.parent / short, root.parent / name, Path(name)]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    if name == _BASE_NAME and not given:
        return None
    raise ValueError(f"{LABEL}: the base model {name} is in none of {', '.join(map(str, folders))}")


def _adapter_on_base(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors of the second form: the base model's, those that were trained whole, and the LoRA."""
    if checkpoint.base is None:
        raise ValueError(
            f"{LABEL}: {checkpoint.folder} has no model.pth, and an adapter needs the base model's weights; put "
            f"{_BASE_NAME} beside {checkpoint.folder.parent}"
        )
    files = sorted(checkpoint.base.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{LABEL}: no *.safetensors in {checkpoint.base}, whose weights the adapter needs")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _plain_names(read_safetensors(path, LABEL)[0])
    tensors |= _plain_names(read_pickle(checkpoint.folder / "non_lora_state_dict.pth", LABEL))
    return tensors | _plain_names(read_safetensors(checkpoint.folder / "adapter_model.safetensors", LABEL)[0])


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without peft's marks in their names, so that trained ones replace the base model's."""
    return {name.removeprefix("base_model.model.").replace(".base_layer.", "."): t for name, t in tensors.items()}


def _plain_name_of(name: str) -> str:
    """The name in Qwen2VLModel of a tensor saved by peft 0.10 or newer with transformers 4 or 5."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    name = name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")
    if name.startswith(("rm_head.", "lm_head.", "visual.", "language_model.")):
        return name
    if name.startswith(("model.visual.", "model.language_model.")):
        return name.removeprefix("model.")
    return "language_model." + name.removeprefix("model.")
