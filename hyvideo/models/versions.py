"""The versions of the models: their families and tasks, and the settings they are meant to be sampled with.

A version is a folder below ``<root>/transformer``; ``versions.yaml`` lists those that are released. A policy that was
trained further keeps the settings of the version it came from.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import yaml

Task = Literal["t2v", "i2v"]


class Version(NamedTuple):
    """A transformer and how to sample from it; the defaults are for one that is not listed."""

    name: str
    family: str  # package of its models
    task: Task | None = None
    resolution: Literal["480p", "720p"] | None = None
    guidance_scale: float = 6.0
    shift: float = 5.0
    num_steps: int = 40
    num_frames: int = 121
    fps: float = 24.0
    sizes: list[tuple[int, int]] = []  # height and width that it is meant for, where they are few
    negative_prompt: str = ""
    vae_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    kind: Literal["base", "cfg_distilled", "step_distilled"] = "base"


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_VERSIONS = {
    name: Version(name, family, **settings | {"sizes": [tuple(size) for size in settings.get("sizes", [])]})
    for family, versions in _TABLE["versions"].items()
    for name, settings in versions.items()
}
FAMILIES = tuple(_TABLE["versions"])  # what names no family is of the first one
ANNOUNCED = frozenset(_TABLE["announced"])
_EMBEDDED = frozenset(_TABLE["embedded"])  # come with the project
RELEASED = {name: version for name, version in _VERSIONS.items() if name not in ANNOUNCED | _EMBEDDED}
UNSUPPORTED: dict[str, str] = _TABLE["unsupported"]  # and why


def version_defaults(name: str | None) -> Version:
    """The settings that belong to a version; those of an unlisted one are the defaults, and the first family's."""
    return _VERSIONS.get(name) or Version(name or "", FAMILIES[0])


def version_for(resolution: str, task: Task, kind: str) -> str:
    """The name of the listed version with these properties. Raises ValueError where there is none."""
    for version in _VERSIONS.values():
        if (version.resolution, version.task, version.kind) == (resolution, task, kind):
            return version.name
    raise ValueError(f"no listed version is {resolution}, {task} and {kind}; take one by --transformer_version")
