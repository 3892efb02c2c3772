"""Files of the original's repositories that are not read: the pickles of the VAE and of
UMT5-XXL.
"""

import shlex
from pathlib import Path

from hyvideo.files.files import read_json

_PICKLES = ("Wan2.1_VAE.pth", "Wan2.2_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth")
_FOLDERS = ("vae", "text_encoder", "tokenizer")
# by the number of heads of the transformer
_REPOSITORIES = {
    12: "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    40: "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    24: "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}


def unread_files(root: Path) -> list[str]:
    """Return a problem if a folder has the original's pickles in place of diffusers' folders."""
    pickles = [name for name in _PICKLES if (root / name).is_file()]
    missing = [name for name in _FOLDERS if not (root / name).is_dir()]
    if not pickles or not missing:
        return []
    download = (
        f'hf download {_repository(root)} --include "$part/*" --local-dir {shlex.quote(str(root))}'
    )
    return [
        f"{root} has the original layout of Wan, of which only the transformer can be read, and "
        f"not {' or '.join(pickles)}. The folders of diffusers' layout are missing: "
        f"{', '.join(missing)}. Download them to the same folder:\n  for part in "
        f"{' '.join(missing)}; do {download}; done"
    ]


def _repository(root: Path) -> str:
    """Return the repository in diffusers' layout of the version whose config.json is in ``root``,
    or that has two experts.
    """
    if (root / "high_noise_model").is_dir():
        return "Wan-AI/Wan2.2-T2V-A14B-Diffusers"  # image-to-video has the same parts
    config = root / "config.json"
    num_heads = read_json(config, "transformer").get("num_heads") if config.is_file() else None
    return _REPOSITORIES.get(num_heads, _REPOSITORIES[12])
