"""What a run or a generation prints about its model version: the license, and steps for which a
student was not made.
"""

from collections.abc import Iterator, Mapping

from hyvideo.config.config import Config
from hyvideo.data.text import Row
from hyvideo.models.versions import Version, version_defaults
from hyvideo.schedulers.transitions import describe_levels, levels_of_steps

Steps = tuple[int, float, str | None]  # number of steps, shift and sigmas


def run_notes(config: Config) -> list[Row]:
    """Return the rows on the version of a training run, with its rollouts and its validation."""
    sampled: dict[str, Steps] = {}
    rollout = config.rollout
    if not config.uses_pairs:
        sampled["rollouts"] = (rollout.grpo_sampling_steps, rollout.shift, rollout.sigmas)
    if config.data.valid_video_csv:
        sampled["validation"] = (
            config.record.validation_steps,
            config.validation_shift,
            config.validation_sigmas,
        )
    return list(_notes(config, sampled))


def generation_notes(config: Config) -> list[Row]:
    """Return the rows on the version of a generation."""
    rollout = config.rollout
    steps = (config.record.validation_steps, rollout.shift, rollout.sigmas)
    return list(_notes(config, {"videos": steps}))


def _notes(config: Config, sampled: Mapping[str, Steps]) -> Iterator[Row]:
    version = version_defaults(config.model.transformer_version)
    if version.license:
        yield "license", f"{version.name}: {version.license}"
    for name, steps in sampled.items():
        if warning := _warning(version, name, steps):
            yield "WARNING", warning


def _warning(version: Version, name: str, steps: Steps) -> str:
    """Return a warning if a student is sampled in other steps than its row has; else ""."""
    own: Steps = (version.num_steps, version.shift, version.sigmas)
    if version.kind != "step_distilled" or levels_of_steps(*steps) == levels_of_steps(*own):
        return ""
    return (
        f"transformer_version {version.name} was distilled for {describe_levels(*own)}, but {name} "
        f"use {describe_levels(*steps)}; videos may be blurred"
    )
