"""Model versions, which are folders in ``<root>/transformer``: families, tasks and recommended
sampling settings.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import yaml

Task = Literal["t2v", "i2v"]


class Version(NamedTuple):
    """Sampling settings of a version; the defaults apply to versions that are not listed."""

    name: str
    family: str  # package name
    task: Task | None = None
    resolution: Literal["480p", "720p", "1080p"] | None = None
    guidance_scale: float = 6.0
    shift: float = 5.0
    num_steps: int = 40
    # noise levels at which the steps begin, of models that cover no others; empty: those of shift
    sigmas: str = ""
    num_frames: int = 121
    fps: float = 24.0
    sizes: list[tuple[int, int]] = []  # recommended (height, width), if only a few are supported
    negative_prompt: str = ""
    vae_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    kind: Literal["base", "cfg_distilled", "step_distilled", "super_resolution"] = "base"
    # trained with float32 rotary frequencies where its family rounds them
    float32_rotary: bool = False
    # resolution of the videos that a super-resolution model refines
    refines: Literal["480p", "720p"] | None = None


_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _version(name: str, family: str, settings: dict) -> Version:
    others = {key: value for key, value in settings.items() if key != "sizes"}
    return Version(
        name, family, sizes=[tuple(size) for size in settings.get("sizes", [])], **others
    )


_VERSIONS = {
    name: _version(name, family, settings)
    for family, versions in _TABLE["versions"].items()
    for name, settings in versions.items()
}
# the first is the default for files and versions that name no family
FAMILIES = tuple(_TABLE["versions"])
ANNOUNCED = frozenset(_TABLE["announced"])
SUPER_RESOLUTION = {name: version for name, version in _VERSIONS.items() if version.refines}
_OTHERS = ANNOUNCED | set(_TABLE["embedded"]) | SUPER_RESOLUTION.keys()
RELEASED = {name: version for name, version in _VERSIONS.items() if name not in _OTHERS}
UNSUPPORTED: dict[str, str] = _TABLE["unsupported"] | {  # version -> reason
    name: f"it is a super-resolution model: use generate.py --sr with a {version.refines} version"
    for name, version in SUPER_RESOLUTION.items()
}


def version_defaults(name: str | None) -> Version:
    """Return the settings of a version; an unlisted version gets the defaults and the first
    family.
    """
    return _VERSIONS.get(name) or Version(name or "", FAMILIES[0])


def version_for(resolution: str, task: Task, kind: str) -> str:
    """Return the name of the version with these properties. Raises ValueError if none is listed."""
    for version in _VERSIONS.values():
        if (version.resolution, version.task, version.kind) == (resolution, task, kind):
            return version.name
    raise ValueError(
        f"no listed version is {resolution}, {task} and {kind}. Choose one by --transformer_version"
    )
