"""Files of a VideoAlign checkpoint: settings, tokenizer and weights, in both released layouts.

VideoReward/model_config.json
VideoReward/checkpoint-11352/tokenizer/                  if missing, of the base model
VideoReward/checkpoint-11352/model.pth                   all weights, or:
VideoReward/checkpoint-11352/adapter_model.safetensors   on top of Qwen2-VL-2B's weights,
VideoReward/checkpoint-11352/non_lora_state_dict.pth     both
"""

import errno
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyvideo.files.files import publish, read_json
from hyvideo.files.text import quote
from hyvideo.rewards.qwen2_vl.model import EMBEDDING, Lora, by_plain_name
from hyvideo.rewards.qwen2_vl.preprocessing import MIN_PIXELS
from hyvideo.rewards.rewards import DIMENSIONS, OVERALL, RESERVED_NAMES
from hyvideo.rewards.videoalign.prompt import TEMPLATES
from hyvideo.weights.weight_files import check_dtypes, read_pickle, read_safetensors

LABEL = "VideoAlign"

_BASE_NAME = "Qwen/Qwen2-VL-2B-Instruct"


@dataclass(frozen=True)
class ModelConfig:
    """Settings of model_config.json: sampling and resizing of frames, prompt, LoRA, and
    normalization of scores.
    """

    fps: float
    num_frames: int | None
    max_pixels: int
    min_pixels: int
    template: str
    lora: Lora | None  # None if all weights were trained
    # names of the scores, at most three, in the order of the reward tokens
    dimensions: tuple[str, ...]
    normalisation: dict[str, float] | None  # <dimension>_mean and _std


@dataclass(frozen=True)
class VideoAlignWeights:
    """Tensors under the names of Qwen2VLModel; a LoRA pair is ``<module>.lora_A.weight`` and
    ``lora_B``.
    """

    model: dict[str, Tensor]  # including the LoRA
    head: Tensor  # (1, hidden)


@dataclass(frozen=True)
class Checkpoint:
    """Paths of a checkpoint's parts, and its settings."""

    folder: Path  # checkpoint-<step>
    base: Path | None  # folder of the base model, if it exists
    settings: ModelConfig

    @property
    def config(self) -> dict[str, Any]:
        """The base model's config.json or, without a base model, the bundled one of Qwen2-VL-2B."""
        if self.base:
            return read_json(self.base / "config.json", LABEL)
        return read_json(Path(__file__).with_name("qwen2_vl_2b.json"), LABEL)

    @property
    def tokenizer(self) -> Path:
        folder = self.folder / "tokenizer"
        if folder.is_dir():
            return folder
        if self.base is None:
            raise ValueError(
                f"{LABEL}: neither {folder} nor a base model with a tokenizer exists; download it "
                "again"
            )
        return self.base


def find_checkpoint(root: str | Path, *, base: str | Path | None = None) -> Checkpoint:
    """Find the newest checkpoint below ``root``. Raises ValueError if none is usable.

    ``base`` is the folder of Qwen2-VL-2B-Instruct; by default, it is searched for in and beside
    ``root``.
    """
    root = Path(root)
    config = read_json(root / "model_config.json", LABEL)
    steps = {
        int(p.name.rpartition("-")[2]): p
        for p in root.glob("checkpoint-*")
        if p.name[11:].isdigit()
    }
    if not steps:
        raise ValueError(f"{LABEL}: no folder checkpoint-<step> in {root}; download it again")
    folder = steps[max(steps)]
    try:
        settings = _read_settings(config, root / "model_config.json")
        base_name = config["model_config"]["model_name_or_path"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{LABEL}: {root / 'model_config.json'} is incomplete or corrupted ({error!r})"
        ) from error
    return Checkpoint(folder, _find_base(root, base_name, base), settings)


def read_weights(checkpoint: Checkpoint) -> VideoAlignWeights:
    """Read the tensors of a checkpoint, memory-mapped if possible.

    Raises ValueError for unusable files.
    """
    whole = checkpoint.folder / "model.pth"
    parts = [read_pickle(whole, LABEL)] if whole.is_file() else _adapter_on_base(checkpoint)
    tensors: dict[str, Tensor] = {}
    for part in parts:  # a later one replaces tensors of the base model
        tensors |= by_plain_name(part, checkpoint.folder, LABEL)
    head = tensors.pop("rm_head.weight", None)
    output = tensors.pop("lm_head.weight", None)
    if head is None:
        raise ValueError(
            f"{LABEL}: no tensor rm_head.weight in {checkpoint.folder}; it is not a reward model"
        )
    if len(head) != 1:
        raise ValueError(
            f"{LABEL}: rm_head.weight in {checkpoint.folder} must have one row, which scores each "
            f"of the reward tokens, got {len(head)}; it belongs to another kind of reward model"
        )
    if output is not None and not torch.equal(output, tensors.get(EMBEDDING, output)):
        # The model ties the two tensors, and the original loads the output layer last.
        tensors[EMBEDDING] = output
    has_lora = any(".lora_" in name for name in tensors)
    is_set = checkpoint.settings.lora is not None
    if has_lora != is_set:  # would silently change the scores
        setting = str(is_set).lower()
        has = "a LoRA" if has_lora else "no LoRA"
        raise ValueError(
            f"{LABEL}: model_config.json has lora_enable {setting}, but {checkpoint.folder} has "
            f"{has}"
        )
    return VideoAlignWeights(tensors, head)


def check_dimensions(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the names of the scores at the reward tokens, in order.

    Raises ValueError for invalid names.
    """
    usable = set(names) - {"", OVERALL, *RESERVED_NAMES}
    if {type(name) for name in names} != {str} or not len(usable) == len(names) <= 3:
        raise ValueError(
            f"{where} must be one to three different names, none of them {OVERALL}, "
            f"{', '.join(RESERVED_NAMES)}, got {quote(names)}"
        )
    return tuple(names)


def save_weights(folder: Path, state: Mapping[str, Tensor], head: Tensor) -> None:
    """Write model.pth in bfloat16: the state dict of a ``Qwen2VLModel`` without a separate LoRA,
    and the head. Raises OSError if the disk is full.
    """
    tensors = {f"model.{name}": tensor.detach().cpu().bfloat16() for name, tensor in state.items()}
    tensors["rm_head.weight"] = head.detach().cpu().bfloat16().clone()
    with publish(folder / "model.pth") as path:
        try:
            torch.save(tensors, path)
        except RuntimeError as error:  # PyTorch does not say why it cannot write
            raise OSError(errno.ENOSPC, f"the weights cannot be written: {error}") from error


def _read_settings(config: dict[str, Any], path: Path) -> ModelConfig:
    data = config["data_config"]
    model = config["model_config"]
    lora = config["peft_lora_config"]
    template = data.get("prompt_template_type")
    if template not in TEMPLATES:
        raise ValueError(
            f"{LABEL}: prompt_template_type in {path} must be one of {list(TEMPLATES)}, got "
            f"{template!r}"
        )
    needed = {
        "sample_type": "uniform",
        "use_special_tokens": True,
        "reward_token": "special",
        "output_dim": 1,
    }
    given = {"sample_type": "uniform"} | data | model
    wrong = [
        f"{name} {given.get(name)!r}, not {needed[name]!r}"
        for name in needed
        if given.get(name) != needed[name]
    ]
    if wrong:
        raise ValueError(
            f"{LABEL}: {path} has settings that this scorer does not support: {'; '.join(wrong)}"
        )
    constants = config.get("inference_config") or {}
    # Missing settings get the original's defaults.
    rank = lora.get("lora_r", 16)
    divisor = math.sqrt(rank) if lora.get("use_rslora") else rank
    return ModelConfig(
        fps=float(data.get("fps") or 2.0),
        num_frames=data.get("num_frames"),
        max_pixels=int(data["max_frame_pixels"]),
        min_pixels=int(data.get("min_frame_pixels", MIN_PIXELS)),
        template=template,
        lora=Lora(rank, lora.get("lora_alpha", 32) / divisor) if lora.get("lora_enable") else None,
        dimensions=tuple(data.get("eval_dim", DIMENSIONS)),
        normalisation=constants or None,
    )


def _find_base(root: Path, name: str, given: str | Path | None) -> Path | None:
    """Return the folder with the base model's config.json; None if the bundled config of
    Qwen2-VL-2B suffices.
    """
    short = Path(name).name
    folders = [root / short, root.parent / short, root.parent / name, Path(name)]
    if given:
        folders = [Path(given)]
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    if name == _BASE_NAME and not given:
        return None
    raise ValueError(f"{LABEL}: base model {name} not found in {', '.join(map(str, folders))}")


def _adapter_on_base(checkpoint: Checkpoint) -> list[dict[str, Tensor]]:
    """Read the adapter layout: the base model's tensors, fully trained replacements of some of
    them, and the LoRA.
    """
    files = sorted(checkpoint.base.glob("*.safetensors")) if checkpoint.base else []
    if not files:
        raise ValueError(
            f"{LABEL}: {checkpoint.folder} has no model.pth, so the base model's weights are "
            f"needed; put {_BASE_NAME} with its *.safetensors beside {checkpoint.folder.parent}"
        )
    adapter = checkpoint.folder / "adapter_model.safetensors"
    parts = {path: read_safetensors(path, LABEL)[0] for path in (*files, adapter)}
    for path, part in parts.items():
        check_dtypes(part, LABEL, path)
    return [
        *(parts[path] for path in files),
        read_pickle(checkpoint.folder / "non_lora_state_dict.pth", LABEL),
        parts[adapter],
    ]
