"""Files of the original's repositories that are not read: the pickles of the VAE and of
UMT5-XXL.
"""

import shlex
from pathlib import Path

import yaml

from hyvideo.data.files import read_json

_PICKLES = ("Wan2.1_VAE.pth", "Wan2.2_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth")
_FOLDERS = ("vae", "text_encoder", "tokenizer")


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
    """Return the repository in diffusers' layout of the version whose config.json is in
    ``root``.
    """
    table = yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text(encoding="utf-8"))[
        "repositories"
    ]
    config = root / "config.json"
    num_heads = read_json(config, "transformer").get("num_heads") if config.is_file() else None
    return table.get(num_heads, next(iter(table.values())))
