"""Super-resolution: a second model refines the final latents of each video at a higher resolution,
for generate.py.

    latents of the base -> resized, upsampled, mixed with noise -> condition of the second model -> latents -> video

The models of HunyuanVideo-1.5 are in its ``versions.yaml``. An upsampler, from layers of diffusers'
VAE, has the original's names of modules. The upsampled latents are further input channels of the
second transformer, which hooks add.
"""

import gc
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as layers
from torch import Tensor, nn

from hyvideo.data.images import bucket_sizes, larger_size, nearest_size, read_image
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.parallelize import parallelize
from hyvideo.files.files import read_json
from hyvideo.generation.video_sampler import STAGE, VideoSampler
from hyvideo.generation.videos import Video
from hyvideo.loading import fit_checks
from hyvideo.loading.model_setup import place_transformers, weights_seed
from hyvideo.models import loading
from hyvideo.models.conditions import Condition, Conditions, to_device
from hyvideo.models.decoding import use_channels_last
from hyvideo.models.family import Family, family_named, install
from hyvideo.models.offload import loaded_on, on_device, put
from hyvideo.models.placement import Placements
from hyvideo.models.sizes import family_of_version
from hyvideo.models.versions import UNSUPPORTED, version_defaults
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import DTYPES, GRPOPipeline
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.sections import DistributedSettings, ModelSettings
from hyvideo.weights import weight_files
from hyvideo.weights.weight_files import Folder

_NOISE = 0.7  # share of noise in the condition
_SMALLEST_TIMESTEP = 700  # with the condition
_Conv = layers.HunyuanVideo15CausalConv3d


class Refiner:
    """Super-resolution model for the videos of a call: first `encode` each, then `load` and `refine`.

    Raises ValueError if the family has no such model, it was not trained on a size, or its files do
    not fit.
    """

    def __init__(self, settings: ModelSettings, run: DistributedSettings, videos: list[Video]):
        self.settings = settings
        self.run = run
        root = settings.pretrained_model_root
        base = settings.transformer_version
        family = family_of_version(root, base)
        refining = [version_defaults(name) for name in UNSUPPORTED]
        buckets = {
            model.name: bucket_sizes(model.refines)
            for model in refining
            if model.refines and model.family == family
        }
        if not buckets:
            raise ValueError(
                f"--sr needs a family with super-resolution models; {base} is of {family}, which "
                "has none"
            )
        sizes = {(video.height, video.width) for video in videos}
        names = [name for name in buckets if sizes <= set(buckets[name])]
        if not names:
            got = " and ".join(f"{height} x {width}" for height, width in sorted(sizes))
            near = {nearest_size(*min(sizes), bucket) for bucket in buckets.values()}
            trained = " or ".join(
                f"--height {height} --width {width}" for height, width in sorted(near)
            )
            raise ValueError(
                f"--sr needs sizes that one super-resolution model was trained on, got {got}. Use "
                f"--resolution, perhaps with --aspect_ratio, or {trained}"
            )
        self.model = version_defaults(names[0])
        self.family = family_named(family)
        problems = self._problems(weights_needed=not settings.random_weights)
        if problems:
            command = (
                f"bash download_weights.sh --version {names[0]} --with none --out "
                f"{shlex.quote(root)}"
            )
            raise ValueError(
                "\n".join([f"--sr needs {names[0]} in {root}. Download it: {command}", *problems])
            )

    def _problems(self, weights_needed: bool) -> list[str]:
        """Return the problems that prevent refining the base model's videos."""
        root, name = Path(self.settings.pretrained_model_root), self.model.name
        base = loading.transformer_folder(root, self.settings.transformer_version)
        folder = Folder(root / "transformer" / name, f"transformer {name!r}")
        problems = weight_files.problems_of(
            lambda: fit_checks.model_problems(
                folder, family=self.family, weights_needed=weights_needed
            )
        )
        problems += weight_files.problems_of(
            lambda: upsampler_problems(root, name, weights_needed=weights_needed)
        )
        if problems:
            return problems
        known, found = (
            loading.read_arguments(self.family.transformer, each)[0] for each in (base, folder)
        )
        # the upsampled latents and a mask
        needed = known["in_channels"] + known["out_channels"] + 1
        if found["in_channels"] != needed:
            return [f"{folder.path} needs in_channels {needed}, got {found['in_channels']}"]
        return []

    def size(self, video: Video) -> dict[str, int]:
        """Return height and width of a refined video."""
        return dict(
            zip(("height", "width"), larger_size(video.height, video.width, self.model.resolution))
        )

    def encode(self, encoder: ConditionEncoder, video: Video) -> Condition:
        """Return the condition, with the image at the refined size; texts are not encoded again."""
        (condition,) = encoder([video.request], (1, *self.size(video).values())).samples
        if condition.image is None:
            return condition
        # As in the original, the features are those of the image's nearest bucket, the latents
        # those of the video.
        picture = read_image(video.request.image)
        height, width = nearest_size(
            picture.height, picture.width, bucket_sizes(self.model.resolution)
        )
        (nearest,) = encoder([video.request], (1, height, width)).samples
        return replace(condition, image=replace(condition.image, embeds=nearest.image.embeds))

    def load(self, base: GRPOPipeline, placements: Placements, mesh: Mesh) -> None:
        """Load the models; the transformer of ``base`` is removed first, to free its memory."""
        model = self.model
        root = self.settings.pretrained_model_root
        device = base.device
        seed = weights_seed(self.settings)
        pipeline = base.with_guidance(base.sampling.guidance.with_scale(None, model.guidance_scale))
        base.transformer = pipeline.transformer = None
        gc.collect()
        upsampler = load_upsampler(root, model.name, self.family, device=device, seed=seed)
        put(upsampler.requires_grad_(False), placements.vae, device)
        transformer = loading.load_transformer(
            root,
            model.name,
            dtype=DTYPES[self.settings.dtype],
            device=loaded_on(placements.policy, device),
            random_weights_seed=seed,
        )
        install(transformer)
        self.low_resolution = LowResolution(transformer)
        parallelize(transformer, mesh, compile=self.run.enable_compile == "true", is_hooked=True)
        pipeline.transformer = transformer
        place_transformers(pipeline, placements, device)
        self.pipeline = pipeline
        self.upsampler = upsampler

    def refine(
        self, latents: Tensor, video: Video, sampler: VideoSampler, encoder: ConditionEncoder
    ) -> Tensor:
        """Return the refined latents of a video, given the final latents of the base model."""
        condition = self.encode(encoder, video)
        video = replace(video, **self.size(video))
        latents = to_device(latents, self.pipeline.device)
        noise = sampler.noise(self.pipeline, video, STAGE, "augmentation")
        with on_device(self.upsampler), torch.no_grad():
            self.low_resolution.latents = self.upsampler.condition(latents, noise)
        schedule = Schedule.ode(self.model.num_steps, self.model.shift)
        return sampler.sample(self.pipeline, schedule, video, Conditions((condition,)), STAGE)

    def record(self, video: Video) -> dict:
        """Return the entry in the JSON file of a video."""
        return {
            "version": self.model.name,
            "steps": self.model.num_steps,
            "shift": self.model.shift,
        } | self.size(video)


class LowResolution:
    """The upsampled latents and a mask, zero at small timesteps, as further channels of a
    transformer's input.
    """

    latents: Tensor  # (batch, channels, frames, height, width), float32

    def __init__(self, transformer: nn.Module):
        transformer.register_forward_pre_hook(self._see_timestep, with_kwargs=True)
        transformer.x_embedder.register_forward_pre_hook(self._added)

    def channels(self, timestep: Tensor) -> Tensor:
        """Return the channels. Shape: (batch, channels + 1, frames, height, width)."""
        mask = (timestep >= _SMALLEST_TIMESTEP).view(-1, 1, 1, 1, 1)
        return torch.cat([self.latents, torch.ones_like(self.latents[:, :1])], dim=1) * mask

    def _see_timestep(self, transformer: nn.Module, inputs: tuple, options: dict) -> None:
        self.timestep = options["timestep"]

    def _added(self, embedder: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return torch.cat([*inputs, self.channels(self.timestep)], dim=1)


def _blocks(*parts: nn.Module) -> nn.ModuleDict:
    """Return the parts in order, under the name that the checkpoint gives them."""
    return nn.ModuleDict({"block": nn.Sequential(*parts)})


class Upsampler(nn.Module):
    """Float32 network from latents to latents of the same shape (batch, channels, frames, height,
    width).
    """

    def condition(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Return the transformer's condition: the latents, resized, upsampled and mixed with noise
        of that size.
        """
        frames = latents.transpose(1, 2).flatten(0, 1)
        resized = F.interpolate(frames, noise.shape[-2:], mode="bilinear", align_corners=False)
        upsampled = self(resized.unflatten(0, (len(latents), -1)).transpose(1, 2))
        return (1 - _NOISE) * upsampled + _NOISE * noise


class Upsampler720p(Upsampler):
    """Residual blocks of three convolutions."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        width: int,
        num_blocks: int,
        global_residual: bool,
    ):
        super().__init__()
        self.in_conv = _Conv(in_channels, width)
        self.out_conv = _Conv(width, out_channels)
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            first, second, third = (_Conv(width, width) for _ in range(3))
            self.blocks.append(_blocks(first, nn.SiLU(), second, nn.SiLU(), third))
        self.global_residual = global_residual

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.in_conv(latents)
        for block in self.blocks:
            hidden = hidden + block["block"](hidden)
        output = self.out_conv(hidden)
        if self.global_residual:
            output = output + latents
        return output


class Upsampler1080p(Upsampler):
    """Levels of the VAE's residual blocks, with an increasing number of channels."""

    def __init__(
        self,
        z_channels: int,
        out_channels: int,
        block_out_channels: tuple[int, ...],
        num_res_blocks: int,
    ):
        super().__init__()
        first, *_, last = inputs = (block_out_channels[0], *block_out_channels)
        self.repeats = first // z_channels
        self.conv_in = _Conv(z_channels, first)
        self.conv_out = _Conv(last, out_channels)
        self.norm_out = layers.HunyuanVideo15RMS_norm(last, images=False)
        self.up = nn.ModuleList()
        for before, after in zip(inputs, block_out_channels):
            widths = [before] + [after] * num_res_blocks
            self.up.append(
                _blocks(*(layers.HunyuanVideo15ResnetBlock(width, after) for width in widths))
            )

    def forward(self, latents: Tensor) -> Tensor:
        hidden = self.conv_in(latents) + latents.repeat_interleave(self.repeats, dim=1)
        for level in self.up:
            hidden = level["block"](hidden)
        return self.conv_out(F.silu(self.norm_out(hidden)))


def build(config: Mapping[str, Any]) -> Upsampler:
    """Return a new upsampler for a config.json."""
    if "num_blocks" in config:
        return Upsampler720p(
            config["in_channels"],
            config["out_channels"],
            config["hidden_channels"],
            config["num_blocks"],
            config.get("global_residual", False),
        )
    return Upsampler1080p(
        config["z_channels"],
        config["out_channels"],
        config["block_out_channels"],
        config["num_res_blocks"],
    )


def to_original(name: str) -> str:
    """Return the original's name of a tensor of an upsampler."""
    return name.replace("conv_shortcut", "nin_shortcut")


def upsampler_problems(root: Path, version: str, *, weights_needed: bool) -> list[str]:
    """Return the problems that prevent loading the upsampler of a version."""
    folder, model = _empty_upsampler(root, version)
    if not weights_needed:
        return []
    header = weight_files.read_header(folder, loading.WEIGHTS_STEM)
    return weight_files.with_label(
        folder, weight_files.tensor_problems(folder, _original_shapes(model), header)
    )


def load_upsampler(
    root: str | Path, version: str, family: Family, *, device: torch.device, seed: int | None = None
) -> Upsampler:
    """Load the upsampler of a version, in float32 and eval mode, with random weights if a seed is
    given.
    """
    folder, model = _empty_upsampler(Path(root), version)
    shapes = _original_shapes(model)
    if seed is None:
        header = weight_files.read_header(folder, loading.WEIGHTS_STEM)
        weights = weight_files.stream_tensors(header, shapes, label=folder.label)
    else:
        weights = weight_files.draw_tensors(seed, shapes, device)
    found = {name: tensor.to(device, torch.float32) for name, tensor in weights}
    state = {name: found[to_original(name)] for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    family.prepare_vae(model)
    if device.type == "cuda":
        use_channels_last(model)
    return model.eval()


def _empty_upsampler(root: Path, version: str) -> tuple[Folder, Upsampler]:
    folder = Folder(root / "upsampler" / version, f"upsampler {version!r}")
    config = read_json(folder.path / "config.json", folder.label)
    with torch.device("meta"):
        return folder, build(config)


def _original_shapes(model: Upsampler) -> weight_files.Shapes:
    shapes = weight_files.shapes_of(model.state_dict())
    return {to_original(name): shape for name, shape in shapes.items()}
