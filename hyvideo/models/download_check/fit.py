"""Checks that the whole files of a part fit the model they are for: names, shapes and settings, from headers alone.

Each check takes the checkpoint folder and the part's folder and gives what does not fit, in sentences. They are the
loaders' own checks where there are some, so that this report and the start of a run agree.
"""

from collections.abc import Callable
from pathlib import Path

from hyvideo.models import fit_checks, loading_encoders
from hyvideo.models.reward_models.videoalign.checkpoint import find_checkpoint
from hyvideo.models.versions import UNSUPPORTED
from hyvideo.models.weight_files import Folder, read_pickle, shapes_of, shortened


def transformer_problems(root: Path, folder: str) -> list[str]:
    """Problems of ``transformer/<version>``, or of the one transformer of the diffusers layout."""
    version = folder.partition("/")[2] or None
    if version in UNSUPPORTED:
        return [f"this version is not supported: {UNSUPPORTED[version]}"]
    return fit_checks.transformer_problems(root, version)


def text_encoder_problems(root: Path, folder: str) -> list[str]:
    return loading_encoders.text_encoder_problems(root) if _has_tokenizer(root, "text_encoder/llm", "tokenizer") else []


def glyph_encoder_problems(root: Path, folder: str) -> list[str]:
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
    shapes = shapes_of(read_pickle(weights, "VideoAlign", device="meta"))
    heads = {name: 1 for name in shapes if name.endswith("rm_head.weight")}
    if not heads:
        return [f"{weights} has no tensor rm_head.weight among {len(shapes)}"]
    rows = heads | {name: checkpoint.settings.lora_rank for name in shapes if ".lora_A." in name}
    return shortened(
        [
            f"tensor {name!r} in {weights} has shape {shapes[name]}, model_config.json asks for {number} rows"
            for name, number in rows.items()
            if shapes[name][0] != number
        ]
    )


def clip_problems(root: Path, folder: str) -> list[str]:
    """Problems of a CLIP model."""
    from transformers import CLIPModel

    return loading_encoders.class_problems(CLIPModel, Folder(root / folder, "CLIP"))


CHECKS: dict[str, Callable[[Path, str], list[str]]] = {
    "transformer": transformer_problems,
    "vae": lambda root, folder: fit_checks.vae_problems(root),
    "text_encoder": text_encoder_problems,
    "glyph_encoder": glyph_encoder_problems,
    "vision_encoder": lambda root, folder: loading_encoders.vision_encoder_problems(root),
    "videoalign": videoalign_problems,
    "clip": clip_problems,
}


def _has_tokenizer(root: Path, *folders: str) -> bool:
    """Claims that the tokenizer, a download of its own, is there; the loaders' checks ask for it first."""
    return any((root / folder / "tokenizer_config.json").is_file() for folder in folders)
