"""What generate.py samples from: the policy, the prompts and images, and the settings.

Without ``sde_type`` the sampler is that of the validation, which is the ODE unless the model
samples with noise; with it, it samples a rollout as in training.

Imports torch only where the policy is read: wrong flags and paths end before.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hyvideo.checkpoints.format import is_lora
from hyvideo.checks.machine_rules import fp8_is_installed
from hyvideo.data.prompts import Request, check_images, read_requests
from hyvideo.files.digests import digest_weights
from hyvideo.files.text import quote
from hyvideo.generation.videos import Video, is_own
from hyvideo.models.placement import ON_DEVICE, Placements
from hyvideo.models.registry import register
from hyvideo.models.versions import RELEASED, version_defaults, version_for
from hyvideo.schedulers.transitions import parse_sigmas
from hyvideo.settings.command_line import read_settings
from hyvideo.settings.config import Config, without_custom_objective
from hyvideo.settings.problems import raise_problems
from hyvideo.settings.sampling import Sampling
from hyvideo.settings.sections import ModelSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hyvideo.models.lora import Lora
    from hyvideo.pipelines.condition_encoder import ConditionEncoder
    from hyvideo.pipelines.grpo_pipeline import GRPOPipeline

MINIATURE = "configs/miniature.yaml"
# Fields of `Sampling` that settings of a call replace, by setting.
SAMPLED = {
    "sample_n_frames": "frames",
    "shift": "shift",
    "sigmas": "sigmas",
    "cfg_scale": "guidance_scale",
    "low_noise_cfg_scale": "low_noise_guidance_scale",
    "negative_prompt": "negative_prompt",
}


@dataclass(frozen=True)
class Source:
    """Policy that generates the videos: a checkpoint of a run, a LoRA, both, or the base model of
    the config.
    """

    checkpoint: Path | None = None
    lora: Path | None = None
    lora_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.lora_scale != 1.0 and not (self.lora and math.isfinite(self.lora_scale)):
            raise ValueError(
                f"--lora_scale must be a finite number and needs --lora_path, got {self.lora_scale}"
            )

    @cached_property
    def policy_hash(self) -> str | None:
        """Digest of the files of the checkpoint and of the LoRA; None for the base model."""
        paths = [path for path in (self.checkpoint, self.lora) if path]
        return digest_weights(paths) if paths else None

    def with_initial_lora(self, lora_path: str) -> "Source":
        """Return the source; if it is the base model, with the initial LoRA of the run's settings,
        if there is one.
        """
        if self.checkpoint or self.lora or not lora_path:
            return self
        return replace(self, lora=Path(lora_path))

    def check(self, model: ModelSettings) -> None:
        """Raise ValueError for files that do not fit the model.

        The files of a checkpoint are compared with its digests (`checkpoints.format.verify`).
        """
        from hyvideo.loading import saved_policy
        from hyvideo.models import loading
        from hyvideo.models.lora import fit_lora

        raise_problems(fp8_is_installed(model))
        root = model.pretrained_model_root
        version = model.transformer_version
        if self.checkpoint:
            saved_policy.check_policy(root, version, self.checkpoint, model.trained_expert)
        if self.lora and self.checkpoint and is_lora(self.checkpoint):
            rule = f"--lora_path cannot be added to the LoRA of the checkpoint {self.checkpoint}"
            raise ValueError(
                f"{rule}; merge both with scripts.export --merge, and pass the result as checkpoint"
            )
        if self.lora:
            fit_lora(
                loading.transformer_on_meta(root, version, model.trained_expert),
                self.read_lora(model),
            )

    def read_lora(self, model: ModelSettings) -> "Lora":
        """Return the LoRA, for the expert of a model of two that ``model`` names."""
        from hyvideo.loading import saved_policy

        return saved_policy.read_saved_lora(
            self.lora, model.trained_expert, ignore_expert=model.ignore_lora_expert
        )

    def load(
        self,
        config: Config,
        device: "torch.device",
        encoder: "ConditionEncoder",
        vae: "nn.Module",
        kinds: frozenset[str],
        *,
        placements: Placements = ON_DEVICE,
        sampling: Sampling | None = None,
    ) -> "GRPOPipeline":
        """Load the pipeline of the policy, whose frozen matrices are stored as the config says; it
        samples as rollouts are unless ``sampling`` is given. The caller then calls
        `place_transformers`.
        """
        from hyvideo.loading import model_setup, saved_policy
        from hyvideo.models.fp8 import store_all
        from hyvideo.models.lora import add_lora
        from hyvideo.pipelines.grpo_pipeline import DTYPES

        is_overwritten = self.checkpoint is not None and not is_lora(self.checkpoint)
        pipeline = model_setup.load_pipeline(
            config,
            device,
            kinds=kinds,
            weights_dtype=DTYPES[config.model.dtype],
            is_overwritten=is_overwritten,
            encoder=encoder,
            vae=vae,
            placements=placements,
            sampling=sampling,
        )
        if self.checkpoint:
            saved_policy.load_into(pipeline.transformer, self.checkpoint, config.trained_expert)
            if is_overwritten and config.model.base_weight_dtype == "fp8":
                store_all(pipeline.transformer, device)
            partner = pipeline.partner
            if partner and saved_policy.has_expert(self.checkpoint, partner.expert):
                saved_policy.load_into(partner.transformer, self.checkpoint, partner.expert)
        if self.lora:
            add_lora(pipeline.transformer, self.read_lora(config.model), scale=self.lora_scale)
        return pipeline


def make_and_read_requests(
    prompts: list[str], csvs: list[str], image: str | None = None, last_image: str | None = None
) -> list[Request]:
    """Return requests for prompts that share given frames, then requests of CSV files.

    Raises ValueError for invalid input.
    """
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise ValueError(f"number {number} of --prompt is blank")
    requests = [Request(prompt, image, last_image) for prompt in prompts] + read_requests(*csvs)
    check_images(requests)
    return requests


def resolve_sampling(
    from_file: dict,
    settings: dict,
    resolution: str | None,
    has_images: bool,
    kinds: dict[str, bool | None],
) -> tuple[Config, Sampling]:
    """Return the settings of a file, or without one the defaults of the version, overridden by
    ``settings``; and how videos are sampled with them.

    The version is given or follows from the resolution. ``kinds`` maps a kind of version to whether
    it is required (None: either); raises ValueError for another version. Videos are sampled as in
    the validation of a run, or as its rollouts if ``settings`` has ``sde_type``. Without a run, the
    version gives the frames.
    """
    register(str(settings.get("family", from_file.get("family", ""))))
    if resolution and "transformer_version" not in settings:
        kind = next((kind for kind, is_required in kinds.items() if is_required), "base")
        task = "i2v" if has_images else "t2v"
        version = version_for(resolution, task, kind)
        settings = settings | {"transformer_version": version}
    if settings.get("sigmas") and "validation_steps" not in settings:
        settings = settings | {"validation_steps": len(parse_sigmas(settings["sigmas"]))}
    # a given shift replaces the levels of a run or a version
    if "shift" in settings and "sigmas" not in settings:
        settings = settings | {"sigmas": ""}
    if not from_file and not settings.keys() & {"pretrained_model_root", "transformer_version"}:
        from_file = read_settings(MINIATURE)
    config = Config.from_flat(without_custom_objective(from_file) | settings).resolved()
    version = version_defaults(config.model.transformer_version)
    for name, is_required in kinds.items():
        if is_required not in (None, version.kind == name):
            known = ", ".join(version.name for version in RELEASED.values() if version.kind == name)
            must = "must be" if is_required else "must not be"
            raise ValueError(
                f"transformer_version {must} {name} with these flags, got "
                f"{config.model.transformer_version}; released {name} versions: {known}"
            )
    sampling = config.validation_sampling
    if "sde_type" in settings:
        sampling = replace(config.sampling, steps=sampling.steps)
    # the default of sample_n_frames is for rollouts, which may be short to save time
    if not from_file:
        sampling = replace(sampling, frames=version.num_frames)
    values = config.flat()
    given = {field: values[name] for name, field in SAMPLED.items() if name in settings}
    sampling = replace(sampling, **given)
    if "sigmas" not in settings and len(parse_sigmas(sampling.sigmas)) != sampling.steps:
        sampling = replace(sampling, sigmas=None)  # levels of another number of steps
    return config, sampling


def list_videos(
    sizes: dict[Request, tuple[int, int]], requests: list[Request], output: Path
) -> list[Video]:
    """List the videos of the requests in order: 0000.mp4, 0001.mp4, ... in a folder, or one mp4
    file by name.

    Raises ValueError if a file that is not of a video has the name of a file that is written.
    """
    if output.suffix == ".mp4" and len(requests) > 1:
        raise ValueError(f"--output_path must be a folder for {len(requests)} videos, got {output}")
    videos = []
    for number, request in enumerate(requests):
        path = output if output.suffix == ".mp4" else output / f"{number:04d}.mp4"
        videos.append(Video(request, *sizes[request], number, path))
    for video in videos:
        for file in (video.record, video.latents):
            if not is_own(file):
                raise ValueError(
                    f"{quote(file)} would be replaced with the video {video.path.name}, but does "
                    "not have settings or latents of a video; move it, or choose another name"
                )
    return videos
