"""What a run or a generation prints about its model version: the license, steps for which a
student was not made, LoRAs that a student needs, and other numbers in the files of the model.
"""

from collections.abc import Iterator, Mapping

from hyvideo.files.text import Row
from hyvideo.models.versions import RELEASED, Version, version_defaults
from hyvideo.schedulers.transitions import describe_levels, levels_of_steps
from hyvideo.settings.config import Config
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import ModelSettings
from hyvideo.weights.pipeline_folder import GUIDER, SCHEDULER, stated_guidance, stated_shift


def run_notes(config: Config) -> list[Row]:
    """Return the rows on the version of a training run, with its rollouts and its validation."""
    sampled = {}
    if not config.objective.videos_from:
        sampled["rollouts"] = config.sampling
    if config.data.valid_video_csv:
        sampled["validation"] = config.validation_sampling
    return list(_notes(config.model, sampled))


def generation_notes(model: ModelSettings, sampling: Sampling) -> list[Row]:
    """Return the rows on the version of a generation."""
    return list(_notes(model, {"videos": sampling}))


def _notes(model: ModelSettings, sampled: Mapping[str, Sampling]) -> Iterator[Row]:
    version = version_defaults(model.transformer_version)
    if version.license:
        yield "license", f"{version.name}: {version.license}"
    root = model.pretrained_model_root
    shift = stated_shift(root)
    for videos, sampling in sampled.items():
        warning = _warning(version, videos, sampling)
        if warning:
            yield "WARNING", warning
        if shift not in (None, sampling.shift) and not sampling.sigmas:
            yield (
                "shift",
                f"{sampling.shift:g} for {videos}; {SCHEDULER} of the model, from which diffusers "
                f"samples, has {shift:g}",
            )
    guidance = stated_guidance(root)
    if version.name in RELEASED and guidance is not None:
        if (guidance > 1) != (version.guidance_scale > 1):
            yield (
                "WARNING",
                f"transformer_version {version.name} has guidance_scale "
                f"{version.guidance_scale:g}, but {GUIDER} of the model has {guidance:g}: "
                "transformer_version or pretrained_model_root is of a model with distilled "
                "guidance, the other is not",
            )
    loras = {
        "base_lora_path": model.base_lora_path,
        "low_noise_base_lora_path": model.low_noise_base_lora_path,
    }
    missing = [name for name, path in loras.items() if not path]
    if missing and version.kind == "step_distilled" and version.boundary is not None:
        yield (
            "WARNING",
            f"transformer_version {version.name} is the base model with a LoRA in each expert; set "
            f"{' and '.join(missing)}, unless pretrained_model_root has them merged. Without them, "
            "videos are blurred",
        )


def _warning(version: Version, videos: str, sampling: Sampling) -> str:
    """Return a warning if a student is sampled in other steps than its row has; else ""."""
    own = (version.num_steps, version.shift, version.sigmas)
    if version.kind != "step_distilled" or sampling.levels == levels_of_steps(*own):
        return ""
    return (
        f"transformer_version {version.name} was distilled for {describe_levels(*own)}, but "
        f"{videos} use {sampling.describe()}; videos may be blurred"
    )
