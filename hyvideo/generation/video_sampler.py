"""Sampling and writing of one video of generate.py, by one process or by those that share it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from hyvideo.data.randomness import normal, reference_normal
from hyvideo.data.videos import write_video
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.tiles import Tiles
from hyvideo.generation.videos import Video
from hyvideo.loading.video_latents import write_latents
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.models.decoding import tile_size_of
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.progress_bar import stage_bar
from hyvideo.records.run_files import write_json
from hyvideo.schedulers.schedule import Schedule
from hyvideo.settings.sections import DataSettings

STAGE = "super-resolution"  # has separate noise
T = TypeVar("T")


@dataclass(frozen=True)
class VideoSampler:
    """Sampler of the videos of a call. ``seed`` applies to requests without one."""

    data: DataSettings
    mesh: Mesh
    seed: int
    initial_noise: str  # "default", "reference" or "validation"
    # called with stage and number of the video at its start and in its loops
    on_stage: Callable[[str, int], None]
    num_videos: int = 1  # of each prompt

    def reported(self, stage: str, video: Video, unit: str) -> Callable[[Iterable[T]], Iterator[T]]:
        """Return a function that shows the loop of a stage as a bar and calls ``on_stage`` before
        each part.
        """
        bar = stage_bar(f"{video.path.name}: {stage}", unit, is_shown=self.mesh.is_main)

        def loop(parts: Iterable[T]) -> Iterator[T]:
            for part in bar(parts):
                self.on_stage(stage, video.number)
                yield part

        return loop

    def sample(
        self,
        pipeline: GRPOPipeline,
        schedule: Schedule,
        video: Video,
        conditions: Conditions,
        *stage: str,
        within: Callable[[GRPOPipeline], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Return the final latents of a video. Shape: (1, channels, frames, height, width).

        A further ``stage`` has separate noise; ``within`` returns the context of the sampling.
        """
        pipeline.with_progress = self.reported("sampling", video, "step")

        def noise(*step: int) -> Tensor:
            return self.noise(pipeline, video, *stage, *step)

        conditions = conditions.to(pipeline.device)
        with within(pipeline):
            if schedule.stochastic_steps:
                return pipeline.sample(conditions, noise(), schedule, noise).final
            return pipeline.sample_ode(conditions, noise(), schedule)

    def noise(self, pipeline: GRPOPipeline, video: Video, *key: int | str) -> Tensor:
        """Return the initial noise of a stage, or the noise of a step; a request's own seed is all
        it depends on.
        """
        shape = pipeline.latent_shape(self.data.sample_n_frames, video.height, video.width)
        seed = video.request.seed_or(self.seed)
        if self.initial_noise == "reference" and key in ((), (STAGE,)):
            drawn = reference_normal(shape, seed)
        elif self.initial_noise == "validation" and STAGE not in key:
            prompt, repeat = divmod(video.number, self.num_videos)
            place = (prompt,) if video.request.seed is None else ()
            kind = "validation step noise" if key else "validation noise"
            drawn = normal(shape, seed, kind, *place, repeat, *key)
        else:
            number = video.number if video.request.seed is None else 0
            drawn = normal(shape, seed, "generate", number, *key)
        return to_device(drawn[None], pipeline.device)

    def write(
        self,
        pipeline: GRPOPipeline,
        latents: Tensor,
        video: Video,
        settings: dict | None = None,
        *,
        vae_weights: str | None = None,
    ) -> None:
        """Decode final latents; the first rank of a replica writes the video, with the digest of
        the VAE's weights its latents and, as JSON, its settings.

        Settings and latents of an earlier video of this name are deleted first, so that they never
        stand beside another video.
        """
        self.on_stage("decoding", video.number)
        pipeline.tiles = Tiles(self.mesh.sp_group, self.reported("decoding", video, "tile"))
        (frames,) = pipeline.decode(latents)
        if frames is None:
            raise FloatingPointError(
                f"{video.path}: the video contains NaN or inf; try --dtype fp32 or another checkpoint"
            )
        if self.mesh.rank % self.mesh.sp_size != 0:
            return
        self.on_stage("writing", video.number)
        video.record.unlink(missing_ok=True)
        video.latents.unlink(missing_ok=True)
        write_video(video.path, frames, self.data.fps)
        if vae_weights:
            write_latents(video.path, latents[0], vae_weights=vae_weights)
        if settings:
            write_json(video.record, settings | {"vae_tile_size": tile_size_of(pipeline.vae)})
