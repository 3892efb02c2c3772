"""What a run or a generation prints about its model version: the license, and steps for which a
student was not made.
"""

from collections.abc import Iterator, Mapping

from hyvideo.data.text import Row
from hyvideo.models.versions import Version, version_defaults
from hyvideo.schedulers.transitions import describe_levels, levels_of_steps
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling


def run_notes(config: Config) -> list[Row]:
    """Return the rows on the version of a training run, with its rollouts and its validation."""
    sampled = {}
    if not config.objective.videos_from:
        sampled["rollouts"] = config.sampling
    if config.data.valid_video_csv:
        sampled["validation"] = config.validation_sampling
    return list(_notes(config.model.transformer_version, sampled))


def generation_notes(version: str, sampling: Sampling) -> list[Row]:
    """Return the rows on the version of a generation."""
    return list(_notes(version, {"videos": sampling}))


def _notes(name: str, sampled: Mapping[str, Sampling]) -> Iterator[Row]:
    version = version_defaults(name)
    if version.license:
        yield "license", f"{version.name}: {version.license}"
    for videos, sampling in sampled.items():
        warning = _warning(version, videos, sampling)
        if warning:
            yield "WARNING", warning


def _warning(version: Version, videos: str, sampling: Sampling) -> str:
    """Return a warning if a student is sampled in other steps than its row has; else ""."""
    own = (version.num_steps, version.shift, version.sigmas)
    if version.kind != "step_distilled" or sampling.levels == levels_of_steps(*own):
        return ""
    return (
        f"transformer_version {version.name} was distilled for {describe_levels(*own)}, but "
        f"{videos} use {sampling.describe()}; videos may be blurred"
    )
