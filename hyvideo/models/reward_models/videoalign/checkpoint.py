"""The released files of VideoAlign: settings, tokenizer and weights, in both of their forms.

    VideoReward/model_config.json
    VideoReward/checkpoint-11352/model.pth                      everything; no other weights are needed
    VideoReward/checkpoint-11352/{adapter_model.safetensors, non_lora_state_dict.pth}    on top of Qwen2-VL-2B's weights
    VideoReward/checkpoint-11352/tokenizer/                     or that of the base model

Names of tensors changed between releases of transformers; both generations are understood and mapped to
``Qwen2VLModel`` of transformers 5.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hyvideo.data.outside import shown
from hyvideo.models.reward_models.rewards import DIMENSIONS, RECORDED, is_finite
from hyvideo.models.reward_models.videoalign.preprocessing import MIN_PIXELS
from hyvideo.models.reward_models.videoalign.prompt import TEMPLATES
from hyvideo.models.weight_files import read_json, read_pickle, read_safetensors

LABEL = "VideoAlign"
CheckpointMode = Literal["auto", "v1", "v2", "v3"]

EMBEDDING = "language_model.embed_tokens.weight"
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
    dimensions: tuple[str, ...]  # names of the scores, at most three, in the order of the reward tokens
    normalisation: dict[str, float] | None  # <dimension>_mean and _std


@dataclass(frozen=True)
class Weights:
    """Tensors under the names of Qwen2VLModel; a LoRA pair is ``<module>.lora_A.weight`` and ``lora_B``."""

    model: dict[str, Tensor]  # and LoRA
    head: Tensor  # (1, hidden)


@dataclass(frozen=True)
class Checkpoint:
    """Paths of the parts, and the settings."""

    folder: Path  # checkpoint-<step>
    base: Path | None  # of the base model, if it is there
    settings: Settings

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the base model; that of Qwen2-VL-2B for users who have the released file alone."""
        own = Path(__file__).with_name("qwen2_vl_2b.json")
        return read_json(self.base / "config.json" if self.base else own, LABEL)

    @property
    def tokenizer(self) -> Path:
        folder = self.folder / "tokenizer"
        if not folder.is_dir() and self.base is None:
            raise ValueError(f"{LABEL}: no tokenizer in {folder}, and no base model to take it from; download it again")
        return folder if folder.is_dir() else self.base


def find_checkpoint(root: str | Path, *, step: int | None = None, base: str | Path | None = None) -> Checkpoint:
    """The newest checkpoint below ``root``, or that of a step. Raises ValueError for what cannot be used.

    ``base``, the folder of Qwen2-VL-2B-Instruct, is looked for beside ``root`` where it is not given.
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
    """The tensors of a checkpoint, memory-mapped where the file allows it. Raises ValueError for what cannot be used.

    ``mode`` is the reference's word for how names are mapped: v1 and v3 are for files of older transformers, as the
    released one, v2 for newer ones. ``auto`` finds out; another mode must be the right one.
    """
    whole = checkpoint.folder / "model.pth"
    parts = [read_pickle(whole, LABEL)] if whole.is_file() else _adapter_on_base(checkpoint)
    is_new = any(".language_model." in f".{name}" for part in parts for name in part)
    if mode != "auto" and is_new != (mode == "v2"):
        names = "v2 (newer transformers)" if is_new else "v1 or v3 (older transformers)"
        raise ValueError(f"reward_checkpoint_mode {mode} does not fit {checkpoint.folder}, whose names are of {names}")
    tensors = {plain_name(name): tensor for part in parts for name, tensor in part.items()}
    head, output = tensors.pop("rm_head.weight", None), tensors.pop("lm_head.weight", None)
    if head is None:
        raise ValueError(f"{LABEL}: no tensor rm_head.weight in {checkpoint.folder}; it is no reward model")
    if output is not None and not torch.equal(output, tensors.get(EMBEDDING, output)):
        # The two are one tensor in the model; the original loads this one last.
        tensors[EMBEDDING] = output
    has_lora = any(".lora_" in name for name in tensors)
    if has_lora != checkpoint.settings.has_lora:  # the scores would change without any sign of it
        setting, has = ("false", "has a LoRA") if has_lora else ("true", "has no LoRA")
        raise ValueError(f"{LABEL}: model_config.json says lora_enable {setting}, and {checkpoint.folder} {has}")
    return Weights(tensors, head)


def check_dimensions(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Names of the scores at the reward tokens, in order. Raises ValueError for what cannot be."""
    if {type(name) for name in names} != {str} or not len(set(names) - {"", "Overall", *RECORDED}) == len(names) <= 3:
        taken = f"Overall, {', '.join(RECORDED)}"
        raise ValueError(f"{where} must be one to three different names, none of them {taken}, got {shown(names)}")
    return tuple(names)


def save_weights(folder: Path, state: Mapping[str, Tensor], head: Tensor) -> None:
    """Writes model.pth in bfloat16: a ``Qwen2VLModel``, without a LoRA beside its weights, and the head."""
    tensors = {f"model.{name}": tensor.detach().cpu().bfloat16() for name, tensor in state.items()}
    torch.save(tensors | {"rm_head.weight": head.detach().cpu().bfloat16().clone()}, folder / "model.pth")


def plain_name(name: str) -> str:
    """The name in Qwen2VLModel, without peft's marks, of a tensor saved with transformers 4 or 5."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")
    if name.startswith(("rm_head.", "lm_head.")):
        return name
    name = name.removeprefix("model.")
    return name if name.startswith(("visual.", "language_model.")) else f"language_model.{name}"


def _read_settings(config: dict[str, Any], path: Path) -> Settings:
    data, model, lora = config["data_config"], config["model_config"], config["peft_lora_config"]
    template = data.get("prompt_template_type")
    if template not in TEMPLATES:
        raise ValueError(f"{LABEL}: {path} asks for the prompt {template!r}, there are {', '.join(TEMPLATES)}")
    needed = {"sample_type": "uniform", "use_special_tokens": True, "reward_token": "special", "output_dim": 1}
    asked = {"sample_type": "uniform"} | data | model
    if wrong := [
        f"{name} {asked.get(name)!r}, not {needed[name]!r}" for name in needed if asked.get(name) != needed[name]
    ]:
        raise ValueError(f"{LABEL}: {path} asks for what this scorer does not do: {'; '.join(wrong)}")
    constants = config.get("inference_config") or {}
    dimensions = check_dimensions(data.get("eval_dim", DIMENSIONS), f"eval_dim of {path}")
    names = [f"{name}_{kind}" for name in dimensions for kind in ("mean", "std")] if constants else []
    if bad := [n for n in names if not is_finite(constants, n) or (n.endswith("std") and constants[n] <= 0)]:
        raise ValueError(f"{LABEL}: {path} has no usable constant {', '.join(bad)}; download it again")
    # Absent settings have the original's defaults.
    rank = lora.get("lora_r", 16)
    return Settings(
        fps=float(data.get("fps") or 2.0),
        num_frames=data.get("num_frames"),
        max_pixels=int(data["max_frame_pixels"]),
        min_pixels=int(data.get("min_frame_pixels", MIN_PIXELS)),
        template=template,
        has_lora=lora.get("lora_enable", False),
        lora_rank=rank,
        lora_scale=lora.get("lora_alpha", 32) / (math.sqrt(rank) if lora.get("use_rslora") else rank),
        dimensions=dimensions,
        normalisation=constants or None,
    )


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


def _adapter_on_base(checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
    """Tensors of the second form: the base model's, those that were trained whole in their place, and the LoRA."""
    files = sorted(checkpoint.base.glob("*.safetensors")) if checkpoint.base else []
    if not files:
        raise ValueError(
            f"{LABEL}: {checkpoint.folder} has no model.pth, and an adapter needs the base model's weights; put "
            f"{_BASE_NAME} with its *.safetensors beside {checkpoint.folder.parent}"
        )
    return [
        *(read_safetensors(path, LABEL)[0] for path in files),
        read_pickle(checkpoint.folder / "non_lora_state_dict.pth", LABEL),
        read_safetensors(checkpoint.folder / "adapter_model.safetensors", LABEL)[0],
    ]
