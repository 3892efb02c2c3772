"""Model versions, which are folders in ``<root>/transformer``: families, tasks and recommended
sampling settings.

Each family declares its versions in ``versions.yaml`` of its package.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from hyvideo.models.guidance import Expert

Task = Literal["t2v", "i2v", "ti2v"]  # ti2v: with or without a reference image


class Version(NamedTuple):
    """Sampling settings of a version; the defaults apply to versions that are not listed."""

    name: str
    family: str  # package name; empty if the version is not listed
    task: Task | None = None
    resolution: Literal["480p", "720p", "1080p"] | None = None
    guidance_scale: float = 6.0
    # of two experts: the noise level from which the high-noise one predicts, and the guidance scale
    # of the other
    boundary: float | None = None
    low_noise_guidance_scale: float | None = None
    shift: float = 5.0
    num_steps: int = 40
    # noise levels at which the steps begin, of models that cover no others; empty: shift decides
    sigmas: str = ""
    num_frames: int = 121
    fps: float = 24.0
    sizes: list[list[int]] = []  # recommended (height, width), if only a few are supported
    negative_prompt: str = ""
    vae_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    kind: Literal["base", "cfg_distilled", "step_distilled", "super_resolution"] = "base"
    # trained with float32 rotary frequencies where its family rounds them
    float32_rotary: bool = False
    # reads where a step ends: MeanFlow and AnyFlow
    is_flow_map: bool = False
    # its own sampler: the ODE, or one that adds new noise after each step (cps with eta 1)
    native: Literal["ode", "renoise"] = "ode"
    # its repository on the Hugging Face Hub, in diffusers' layout if there is one
    repository: str = ""
    # license, if the family's other versions have another one; a run prints it
    license: str = ""
    # resolution of the videos that a super-resolution model refines
    refines: Literal["480p", "720p"] | None = None


VERSIONS_FILE = "versions.yaml"
_VERSIONS: dict[str, Version] = {}
# the first is the default for files that name no family
FAMILIES: list[str] = []
ANNOUNCED: set[str] = set()
RELEASED: dict[str, Version] = {}
UNSUPPORTED: dict[str, str] = {}  # version -> reason


def add_versions(family: str, file: Path) -> None:
    """Add the versions of a family, from its ``versions.yaml``.

    Raises ValueError if one belongs to another family.
    """
    table = yaml.safe_load(file.read_text(encoding="utf-8"))
    versions = {
        name: Version(name, family, **settings or {})
        for name, settings in table["versions"].items()
    }
    for name in versions:
        if name in _VERSIONS:
            raise ValueError(
                f"{file} lists the version {name}, which belongs to the family "
                f"{_VERSIONS[name].family}; rename it"
            )
    FAMILIES.append(family)
    _VERSIONS.update(versions)
    ANNOUNCED.update(table.get("announced", []))
    hidden = {*table.get("announced", []), *table.get("embedded", [])}
    for name, version in versions.items():
        if version.refines:
            UNSUPPORTED[name] = (
                "it is a super-resolution model: use generate.py --sr with a "
                f"{version.refines} version"
            )
        elif name not in hidden:
            RELEASED[name] = version
    UNSUPPORTED.update(table.get("unsupported", {}))


for _file in sorted(Path(__file__).parent.glob(f"*/{VERSIONS_FILE}")):
    add_versions(_file.parent.name, _file)


def experts_of(version: str | None) -> tuple[Expert | None, ...]:
    """Return the experts of a version; (None,) for a single transformer."""
    return ("high", "low") if version_defaults(version).boundary is not None else (None,)


def version_defaults(name: str | None) -> Version:
    """Return the settings of a version; an unlisted version gets the defaults and no family."""
    return _VERSIONS.get(name) or Version(name or "", family="")


def version_for(resolution: str, task: Task, kind: str) -> str:
    """Return the name of the version with these properties. Raises ValueError if none is listed."""
    for version in _VERSIONS.values():
        if (version.resolution, version.task, version.kind) == (resolution, task, kind):
            return version.name
    raise ValueError(
        f"no listed version is {resolution}, {task} and {kind}. Choose one by --transformer_version"
    )
