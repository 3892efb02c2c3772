"""The config.json of a transformer or VAE."""

from pathlib import Path
from typing import Any

from hyvideo.files.files import read_json
from hyvideo.models.registry import is_built_in, module_of, packages


def read_config(folder: Path, label: str) -> dict[str, Any]:
    """Return the config.json in a folder, completed with what only the tensors beside it say: see
    ``completed`` in the settings of a family.

    Raises ValueError for a missing or invalid file.
    """
    config = read_json(folder / "config.json", label)
    family = packages().get(str(config.get("_class_name")))
    if family is None or not is_built_in(family):
        return config
    completed = getattr(module_of(family, "settings"), "completed", None)
    return completed(config, folder) if completed else config
