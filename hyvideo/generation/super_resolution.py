"""Super-resolution: a second model refines the final latents of each video at a higher resolution,
for generate.py.

    latents of the base -> resized, upsampled, mixed with noise -> condition of the second model -> latents -> video

The models are in ``versions.yaml``; a family with an ``upsampler`` supports them.
"""

import gc
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.data.images import bucket_sizes, larger_size, nearest_size, read_image
from hyvideo.distributed.mesh import Mesh
from hyvideo.generation.offloading import place
from hyvideo.generation.video_sampler import STAGE, Video, VideoSampler
from hyvideo.models import fit_checks, loading
from hyvideo.models.conditions import Condition, Conditions, to_device
from hyvideo.models.family import install
from hyvideo.models.offload import offload, on_device
from hyvideo.models.sizes import family_of_version
from hyvideo.models.versions import SUPER_RESOLUTION
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import DTYPES, GRPOPipeline
from hyvideo.records.progress_bar import stage_bar
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.offloading import Offloading
from hyvideo.settings.sections import DistributedSettings, ModelSettings
from hyvideo.training.model_setup import weights_seed


class Refiner:
    """Super-resolution model for the videos of a call: first `encode` each, then `refine`.

    Raises ValueError if the family has no such model, it was not trained on a size, or its files do
    not fit. ``saves_base`` also writes the videos of the base model.
    """

    def __init__(
        self,
        settings: ModelSettings,
        run: DistributedSettings,
        videos: list[Video],
        saves_base: bool | None,
    ):
        self.settings = settings
        self.run = run
        self.saves_base = saves_base
        root, base = settings.pretrained_model_root, settings.transformer_version
        family = family_of_version(root, base)
        buckets = {
            m.name: bucket_sizes(m.refines) for m in SUPER_RESOLUTION.values() if m.family == family
        }
        if not buckets:
            raise ValueError(
                f"--sr needs a family with super-resolution models; {base} is of {family}, which "
                "has none"
            )
        sizes = {(video.height, video.width) for video in videos}
        if not (names := [name for name in buckets if sizes <= set(buckets[name])]):
            got = " and ".join(f"{height} x {width}" for height, width in sorted(sizes))
            near = {nearest_size(*min(sizes), bucket) for bucket in buckets.values()}
            trained = " or ".join(
                f"--height {height} --width {width}" for height, width in sorted(near)
            )
            raise ValueError(
                f"--sr needs sizes that one super-resolution model was trained on, got {got}. Use "
                f"--resolution, perhaps with --aspect_ratio, or {trained}"
            )
        self.model = SUPER_RESOLUTION[names[0]]
        needed = not settings.random_weights
        if problems := fit_checks.super_resolution_problems(
            root, base, names[0], weights_needed=needed
        ):
            command = (
                f"bash download_weights.sh --version {names[0]} --with none --out "
                f"{shlex.quote(root)}"
            )
            raise ValueError(
                "\n".join([f"--sr needs {names[0]} in {root}. Download it: {command}", *problems])
            )

    def size(self, video: Video) -> dict[str, int]:
        """Return height and width of a refined video."""
        return dict(
            zip(("height", "width"), larger_size(video.height, video.width, self.model.resolution))
        )

    def encode(self, encoder: ConditionEncoder, video: Video) -> Condition:
        """Return the condition, with the image at the refined size; texts are not encoded again."""
        (condition,) = encoder([video.request], **self.size(video)).samples
        if condition.image is None:
            return condition
        # As in the original, the features are those of the image's nearest bucket, the latents
        # those of the video.
        picture = read_image(video.request.image)
        height, width = nearest_size(
            picture.height, picture.width, bucket_sizes(self.model.resolution)
        )
        (nearest,) = encoder([video.request], height=height, width=width).samples
        return replace(condition, image=replace(condition.image, embeds=nearest.image.embeds))

    def refine(
        self,
        finals: Iterable[tuple[Tensor, Video]],
        base: GRPOPipeline,
        sampler: VideoSampler,
        offloading: Offloading,
        encoder: ConditionEncoder,
        *,
        folder: Path,
    ) -> Iterator[Tensor]:
        """Yield the refined latents of each video, once the base model has sampled all of them.

        The latents of the base model are files in ``folder`` in the meantime.
        """
        videos = []
        for latents, video in finals:
            save_file(
                {"latents": latents.contiguous()}, folder / f"latents-{video.number}.safetensors"
            )
            videos.append(video)
            if self.saves_base:
                before = replace(video, path=video.path.with_stem(f"{video.path.stem}_before_sr"))
                sampler.write(base, latents, before)
        sampler.on_stage("loading of super-resolution", 0)
        pipeline, upsampler = self._load(base, offloading, sampler.mesh)
        schedule = Schedule.ode(self.model.num_steps, self.model.shift)
        bar = stage_bar(STAGE, "video", is_shown=sampler.mesh.is_main)
        for video in bar(videos):
            sampler.on_stage(STAGE, video.number)
            condition = self.encode(encoder, video)
            latents = load_file(folder / f"latents-{video.number}.safetensors")["latents"]
            video = replace(video, **self.size(video))
            latents, noise = (
                to_device(latents, base.device),
                sampler.noise(pipeline, video, STAGE, "augmentation"),
            )
            with on_device(upsampler), torch.no_grad():
                condition = replace(
                    condition, low_resolution=upsampler.condition(latents, noise)[0]
                )
            yield sampler.sample(pipeline, schedule, video, Conditions((condition,)), STAGE)

    def _load(
        self, base: GRPOPipeline, offloading: Offloading, mesh: Mesh
    ) -> tuple[GRPOPipeline, nn.Module]:
        """Return the pipeline and the upsampler.

        The transformer of ``base`` is removed first, to free its memory.
        """
        model = self.model
        root = self.settings.pretrained_model_root
        device = base.device
        seed = weights_seed(self.settings)
        pipeline = base.with_guidance(model.guidance_scale)
        base.transformer = pipeline.transformer = None
        gc.collect()
        upsampler = loading.load_vae(
            root, upsampler=model.name, device=device, random_weights_seed=seed
        )
        if offloading.offloading:
            offload(upsampler)
        transformer = loading.load_transformer(
            root,
            model.name,
            dtype=DTYPES[self.settings.dtype],
            device="cpu" if offloading.group_offloading else device,
            random_weights_seed=seed,
        )
        install(transformer)
        place(transformer, mesh, device, self.run, offloading, False)
        pipeline.transformer = transformer
        return pipeline, upsampler

    def record(self, video: Video) -> dict:
        """Return the entry in the JSON file of a video."""
        return {
            "version": self.model.name,
            "steps": self.model.num_steps,
            "shift": self.model.shift,
        } | self.size(video)
