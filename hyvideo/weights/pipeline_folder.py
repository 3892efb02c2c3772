"""What a pipeline's folder in diffusers' layout says about the model, beside the configs of its parts.

    model_index.json                      class of the pipeline, noise level between two experts
    scheduler/scheduler_config.json       shift
    guider/guider_config.json             guidance scale, of HunyuanVideo-1.5

A run takes the numbers of its version, which are those of the authors' model cards, so these files
are only compared with it. Without a model_index.json, a folder is in the layout of the authors, who
keep one scheduler for several models.
"""

from pathlib import Path
from typing import Any

from hyvideo.files.files import read_json

INDEX = "model_index.json"
SCHEDULER = "scheduler/scheduler_config.json"
GUIDER = "guider/guider_config.json"


def read_index(root: str | Path) -> dict[str, Any]:
    """Return the model_index.json of a folder; empty without one."""
    path = Path(root) / INDEX
    return read_json(path, "pipeline") if path.is_file() else {}


def stated_shift(root: str | Path) -> float | None:
    """Return the shift with which diffusers samples the pipeline of a folder; None if it has no
    constant one.
    """
    config = _config(root, SCHEDULER)
    if config.get("use_dynamic_shifting"):
        return None
    return _number(config.get("flow_shift", config.get("shift")))


def stated_guidance(root: str | Path) -> float | None:
    """Return the guidance scale in the config of a pipeline's guider; None without one."""
    return _number(_config(root, GUIDER).get("guidance_scale"))


def _config(root: str | Path, name: str) -> dict[str, Any]:
    path = Path(root) / name
    return read_json(path, "pipeline") if read_index(root) and path.is_file() else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
