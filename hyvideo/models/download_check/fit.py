"""Checks that the whole files of a part fit the model they are for: names, shapes and settings, from headers alone.

Each check takes the checkpoint folder and the part's folder and gives what does not fit, in sentences. They are the
loaders' own checks where there are some, so that this report and the start of a run agree.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from hyvideo.models import fit_checks, loading_encoders
from hyvideo.models.reward_models.videoalign.checkpoint import find_checkpoint
from hyvideo.models.versions import UNSUPPORTED
from hyvideo.models.weight_files import (
    Folder,
    Shapes,
    Weights,
    read_header,
    read_json,
    read_pickle,
    shapes_of,
    shortened,
    tensor_problems,
)


def transformer_problems(root: Path, folder: str) -> list[str]:
    """Problems of ``transformer/<version>``, or of the one transformer of the diffusers layout."""
    version = folder.partition("/")[2] or None
    if version in UNSUPPORTED:
        return [f"this version is not supported: {UNSUPPORTED[version]}"]
    return fit_checks.transformer_problems(root, version)


def text_encoder_problems(root: Path, folder: str) -> list[str]:
    return loading_encoders.text_encoder_problems(root) if _has_tokenizer(root, "text_encoder/llm", "tokenizer") else []


def glyph_encoder_problems(root: Path, folder: str) -> list[str]:
    """Problems of ``byt5_model.pt``, read on the meta device, or of diffusers' text_encoder_2."""
    pickled = root / folder / "checkpoints/byt5_model.pt"
    if pickled.is_file() and not any(name.endswith("embed_tokens.weight") for name in pickled_shapes(pickled)):
        return [f"{pickled} holds no ByT5 encoder: none of its tensors is embed_tokens.weight"]
    has_tokenizer = _has_tokenizer(root, "text_encoder/byt5-small", "tokenizer_2")
    return loading_encoders.glyph_encoder_problems(root) if has_tokenizer else []


def videoalign_problems(root: Path, folder: str) -> list[str]:
    """Problems of the newest VideoAlign checkpoint: its settings, the head, and the LoRA's rank.

    The base model's config is not part of the download, so the other shapes are compared when it is loaded.
    """
    checkpoint = find_checkpoint(root / folder)
    weights = checkpoint.folder / "model.pth"
    if not weights.is_file():
        weights = checkpoint.folder / "non_lora_state_dict.pth"
    if not weights.is_file():
        return [f"{checkpoint.folder} is the newest checkpoint and has neither model.pth nor {weights.name}"]
    shapes, rank = pickled_shapes(weights), checkpoint.settings.lora_rank
    heads = {name: shape for name, shape in shapes.items() if name.endswith("rm_head.weight")}
    problems = [] if heads else [f"{weights} has no tensor rm_head.weight among {len(shapes)}"]
    expected_rows = {name: (1, "output_dim") for name in heads} | {
        name: (rank, "lora_r") for name in shapes if ".lora_A." in name
    }
    problems += [
        f"tensor {name!r} in {weights} has shape {shapes[name]}, model_config.json says {setting} {rows}"
        for name, (rows, setting) in expected_rows.items()
        if shapes[name][0] != rows
    ]
    return shortened(problems)


def clip_problems(root: Path, folder: str) -> list[str]:
    """Problems of a CLIP model; buffers that older files hold beside its weights do not matter."""
    from transformers import CLIPConfig, CLIPModel

    path = Folder(root / folder, "CLIP")
    read_json(path.path / "config.json", path.label)
    with torch.device("meta"):
        expected = shapes_of(CLIPModel(CLIPConfig.from_pretrained(path.path, local_files_only=True)).state_dict())
    weights = read_header(path, "model")
    known = {name: shape for name, shape in weights.shapes.items() if name in expected}
    return shortened(tensor_problems(path, expected, Weights(known, weights.files, weights.drawn)))


CHECKS: dict[str, Callable[[Path, str], list[str]]] = {
    "transformer": transformer_problems,
    "vae": lambda root, folder: fit_checks.vae_problems(root),
    "text_encoder": text_encoder_problems,
    "glyph_encoder": glyph_encoder_problems,
    "vision_encoder": lambda root, folder: loading_encoders.vision_encoder_problems(root),
    "videoalign": videoalign_problems,
    "clip": clip_problems,
}


def pickled_shapes(path: Path) -> Shapes:
    """Names and shapes in a file of ``torch.save``, without its numbers; ValueError for a damaged one."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"  # the older format cannot be mapped, and is read through
    return shapes_of(read_pickle(path, "checkpoints", device="meta", mmap=is_archive))


def _has_tokenizer(root: Path, *folders: str) -> bool:
    """Claims that the tokenizer, a download of its own, is there; the loaders' checks ask for it first."""
    return any((root / folder / "tokenizer_config.json").is_file() for folder in folders)
