"""Super-resolution: a second model refines the final latents of each video at a higher resolution,
for generate.py.

    latents of the base -> resized, upsampled, mixed with noise -> condition of the second model -> latents -> video

The models are in ``versions.yaml``; a family with an ``upsampler`` supports them.
"""

import gc
import shlex
from dataclasses import replace

import torch
from torch import Tensor

from hyvideo.data.images import bucket_sizes, larger_size, nearest_size, read_image
from hyvideo.distributed.mesh import Mesh
from hyvideo.generation.offloading import place
from hyvideo.generation.video_sampler import STAGE, Video, VideoSampler
from hyvideo.models import fit_checks, loading
from hyvideo.models.conditions import Condition, Conditions, to_device
from hyvideo.models.family import install
from hyvideo.models.offload import offload, on_device
from hyvideo.models.sizes import family_of_version
from hyvideo.models.versions import UNSUPPORTED, version_defaults
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import DTYPES, GRPOPipeline
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.offloading import Offloading
from hyvideo.settings.sections import DistributedSettings, ModelSettings
from hyvideo.training.model_setup import weights_seed


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
        problems = fit_checks.super_resolution_problems(
            root, base, names[0], weights_needed=not settings.random_weights
        )
        if problems:
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

    def load(self, base: GRPOPipeline, offloading: Offloading, mesh: Mesh) -> None:
        """Load the models; the transformer of ``base`` is removed first, to free its memory."""
        model = self.model
        root = self.settings.pretrained_model_root
        device = base.device
        seed = weights_seed(self.settings)
        pipeline = base.with_guidance(base.sampling.guidance.with_scale(None, model.guidance_scale))
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
            condition = replace(
                condition, low_resolution=self.upsampler.condition(latents, noise)[0]
            )
        schedule = Schedule.ode(self.model.num_steps, self.model.shift)
        return sampler.sample(self.pipeline, schedule, video, Conditions((condition,)), STAGE)

    def record(self, video: Video) -> dict:
        """Return the entry in the JSON file of a video."""
        return {
            "version": self.model.name,
            "steps": self.model.num_steps,
            "shift": self.model.shift,
        } | self.size(video)
