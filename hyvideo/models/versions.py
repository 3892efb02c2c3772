"""The released versions of HunyuanVideo-1.5: their tasks, and the settings they are meant to be sampled with.

A version is a folder below ``<root>/transformer``; ``versions.yaml`` lists them. A policy that was trained further
keeps the settings of the version it came from.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import yaml

Task = Literal["t2v", "i2v"]


class Version(NamedTuple):
    """A transformer and how to sample from it."""

    name: str
    resolution: Literal["480p", "720p"]
    task: Task
    guidance_scale: float
    shift: float
    num_steps: int
    kind: Literal["base", "cfg_distilled", "step_distilled"]


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_VERSIONS = {name: Version(name, **settings) for name, settings in _TABLE["versions"].items()}
ANNOUNCED = frozenset(_TABLE["announced"])
RELEASED = {name: version for name, version in _VERSIONS.items() if name not in ANNOUNCED}
UNSUPPORTED: dict[str, str] = _TABLE["unsupported"]  # and why
PIPELINE_TASKS: dict[str, Task] = _TABLE["pipeline_tasks"]


def version_defaults(name: str | None) -> Version | None:
    """The settings that belong to a version, or None for a model of another name, such as the miniature."""
    return _VERSIONS.get(name)
