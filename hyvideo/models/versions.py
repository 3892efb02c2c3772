"""The released versions of HunyuanVideo-1.5: their tasks, and the settings they are meant to be sampled with.

A version is a folder below ``<root>/transformer``. The numbers are the authors' (their model card); a policy that was
trained further keeps the settings of the version it came from.
"""

from typing import Literal, NamedTuple

Task = Literal["t2v", "i2v"]
Kind = Literal["base", "cfg_distilled", "step_distilled"]


class Version(NamedTuple):
    """A transformer and how to sample from it."""

    name: str
    resolution: Literal["480p", "720p"]
    task: Task
    guidance_scale: float  # 1 runs one branch: the effect of guidance was distilled into the weights
    shift: float
    num_steps: int
    kind: Kind


_VERSIONS = (
    Version("480p_t2v", "480p", "t2v", 6.0, 5.0, 50, "base"),
    Version("480p_i2v", "480p", "i2v", 6.0, 5.0, 50, "base"),
    Version("720p_t2v", "720p", "t2v", 6.0, 9.0, 50, "base"),
    Version("720p_i2v", "720p", "i2v", 6.0, 7.0, 50, "base"),
    Version("480p_t2v_distilled", "480p", "t2v", 1.0, 5.0, 50, "cfg_distilled"),
    Version("480p_i2v_distilled", "480p", "i2v", 1.0, 5.0, 50, "cfg_distilled"),
    Version("720p_t2v_distilled", "720p", "t2v", 1.0, 9.0, 50, "cfg_distilled"),
    Version("720p_i2v_distilled", "720p", "i2v", 1.0, 7.0, 50, "cfg_distilled"),
    Version("480p_i2v_step_distilled", "480p", "i2v", 1.0, 7.0, 12, "step_distilled"),
)

# In the authors' list as "coming soon"; settings are known, a download may not be.
ANNOUNCED = frozenset({"720p_t2v_distilled"})

RELEASED: dict[str, Version] = {version.name: version for version in _VERSIONS if version.name not in ANNOUNCED}

_SPARSE = "its sparse attention needs a kernel that diffusers' class does not have"
_SUPER_RESOLUTION = "it is a super-resolution model: another input (98 channels) and an upsampler that diffusers lacks"

# Name -> why this project cannot use it.
UNSUPPORTED: dict[str, str] = {
    "720p_t2v_distilled_sparse": _SPARSE,
    "720p_i2v_distilled_sparse": _SPARSE,
    "720p_sr_distilled": _SUPER_RESOLUTION,
    "1080p_sr_distilled": _SUPER_RESOLUTION,
}

# diffusers' pipelines -> the task of their transformer, as model_index.json says. Its config.json may be wrong: the
# script that made the hub's checkpoints writes i2v into that of 480p_t2v (diffusers 0.42.1).
PIPELINE_TASKS: dict[str, Task] = {
    "HunyuanVideo15Pipeline": "t2v",
    "HunyuanVideo15ImageToVideoPipeline": "i2v",
}


def version_defaults(name: str | None) -> Version | None:
    """The settings that belong to a version, or None for a model of another name, such as the miniature."""
    return next((version for version in _VERSIONS if version.name == name), None)
