"""Files of the original's repositories that are not read: the pickles of the VAE, of UMT5-XXL and of
CLIP.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyvideo.files.files import read_json

_PICKLES = (
    "Wan2.1_VAE.pth",
    "Wan2.2_VAE.pth",
    "models_t5_umt5-xxl-enc-bf16.pth",
    "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
)
_FOLDERS = ("vae", "text_encoder", "tokenizer")
# of Wan2.1 image-to-video, by model_type of its config.json
_CLIP_FOLDERS = ("image_encoder", "image_processor")
_WITH_CLIP = {
    "i2v": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "flf2v": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
}
# of the other models, by the number of heads of the transformer
_REPOSITORIES = {
    12: "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    40: "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    24: "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}


def unread_files(root: Path) -> list[str]:
    """Return a problem if a folder has the original's pickles in place of diffusers' folders."""
    path = root / "config.json"
    config = read_json(path, "transformer") if path.is_file() else {}
    folders = _FOLDERS
    if config.get("model_type") in _WITH_CLIP:
        folders += _CLIP_FOLDERS
    pickles = [name for name in _PICKLES if (root / name).is_file()]
    missing = [name for name in folders if not (root / name).is_dir()]
    if not pickles or not missing:
        return []
    repository = _repository(root, config)
    download = f'hf download {repository} --include "$part/*" --local-dir {shlex.quote(str(root))}'
    return [
        f"{root} has the original layout of Wan, of which only the transformer can be read, and "
        f"not {' or '.join(pickles)}. The folders of diffusers' layout are missing: "
        f"{', '.join(missing)}. Download them to the same folder:\n  for part in "
        f"{' '.join(missing)}; do {download}; done"
    ]


def _repository(root: Path, config: Mapping[str, Any]) -> str:
    """Return the repository in diffusers' layout of the version with this config.json, or that has
    two experts.
    """
    if (root / "high_noise_model").is_dir():
        return "Wan-AI/Wan2.2-T2V-A14B-Diffusers"  # image-to-video has the same parts
    of_heads = _REPOSITORIES.get(config.get("num_heads"), _REPOSITORIES[12])
    return _WITH_CLIP.get(config.get("model_type"), of_heads)
