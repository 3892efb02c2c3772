"""Sampling and writing of one video of generate.py, by one process or by those that share it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyvideo.config.all_settings import DataSettings
from hyvideo.data.cli import keep_traceback
from hyvideo.data.files import parse_json, read_text
from hyvideo.data.pairs import LATENTS_SUFFIX, VIDEO_KEY
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal, reference_normal
from hyvideo.data.videos import write_video
from hyvideo.distributed.mesh import Mesh
from hyvideo.distributed.tiles import Tiles
from hyvideo.models.conditions import Conditions, to_device
from hyvideo.models.decoding import tile_size_of
from hyvideo.models.offload import on_device
from hyvideo.models.step_cache import StepCache
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.progress_bar import stage_bar
from hyvideo.records.run_files import write_json
from hyvideo.schedulers.schedule import Schedule
from hyvideo.training.pair_latents import write_latents

RECORD_SUFFIX = ".json"  # of the file beside a video that has its settings
STAGE = "super-resolution"  # has separate noise
T = TypeVar("T")


@dataclass(frozen=True)
class Video:
    """A video to generate."""

    request: Request
    height: int
    width: int
    number: int  # index in this call; the noise depends on it and on the seed
    path: Path


def files_beside(video: Path) -> list[Path]:
    """Return the files beside a video that are replaced with it: its settings and its latents."""
    return [video.with_suffix(suffix) for suffix in (RECORD_SUFFIX, LATENTS_SUFFIX)]


def is_own(file: Path) -> bool:
    """Return whether a file beside a video has settings or latents of a video, and may be removed.

    A link is not followed, because removing it leaves its target.
    """
    if file.is_symlink() or not file.is_file():
        return file.is_symlink() or not file.exists()
    try:
        if file.suffix == LATENTS_SUFFIX:
            with safe_open(file, framework="numpy") as opened:
                return VIDEO_KEY in (opened.metadata() or {})
        content = parse_json(read_text(file))
        return isinstance(content, dict) and {"prompt", "seed"} <= content.keys()
    except (OSError, ValueError, SafetensorError):
        return False


@dataclass(frozen=True)
class VideoSampler:
    """Sampler of the videos of a call. ``seed`` applies to requests without one."""

    data: DataSettings
    mesh: Mesh
    seed: int
    initial_noise: str  # "default" or "reference"
    # called with stage and number of the video at its start and in its loops
    on_stage: Callable[[str, int], None]

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

    @keep_traceback()
    def sample(
        self,
        pipeline: GRPOPipeline,
        schedule: Schedule,
        video: Video,
        conditions: Conditions,
        *stage: str,
        new_cache: Callable[[], StepCache] | None = None,
    ) -> Tensor:
        """Return the final latents of a video. Shape: (1, channels, frames, height, width).

        A further ``stage`` has separate noise; ``new_cache`` makes a step cache.
        """
        pipeline.with_progress = self.reported("sampling", video, "step")
        pipeline.transformer.step_cache = new_cache and new_cache()

        def noise(*step: int) -> Tensor:
            return self.noise(pipeline, video, *stage, *step)

        conditions = conditions.to(pipeline.device)
        with on_device(pipeline.transformer):
            if schedule.stochastic_steps:
                latents = pipeline.sample(conditions, noise(), schedule, noise).final
            else:
                latents = pipeline.sample_ode(conditions, noise(), schedule)
        pipeline.transformer.step_cache = None  # frees its tokens
        return latents

    def candidate(
        self,
        pipeline: GRPOPipeline,
        schedule: Schedule,
        video: Video,
        conditions: Conditions,
        number: int,
        *,
        new_cache: Callable[[], StepCache] | None = None,
    ) -> Tensor:
        """Return the final latents of a candidate of a video; candidate 0 is the video without
        further candidates, each of the others has other noise.
        """
        stage = [f"candidate {number}"] if number else []
        return self.sample(pipeline, schedule, video, conditions, *stage, new_cache=new_cache)

    def noise(self, pipeline: GRPOPipeline, video: Video, *key: int | str) -> Tensor:
        """Return the initial noise of a stage, or the noise of a step; a request's own seed is all
        it depends on.
        """
        shape = pipeline.latent_shape(self.data.sample_n_frames, video.height, video.width)
        number = video.number if video.request.seed is None else 0
        seed = video.request.seed_or(self.seed)
        is_original = self.initial_noise == "reference" and key in ((), (STAGE,))
        drawn = (
            reference_normal(shape, seed)
            if is_original
            else normal(shape, seed, "generate", number, *key)
        )
        return to_device(drawn[None], pipeline.device)

    @keep_traceback()
    def write(
        self,
        pipeline: GRPOPipeline,
        latents: Tensor,
        video: Video,
        settings: dict | None = None,
        *,
        keep_latents: bool = False,
    ) -> None:
        """Decode final latents; the first rank of a replica writes the video and, as JSON, its
        settings.

        With ``keep_latents``, the latents are written too. Settings and latents of an earlier video
        of this name are deleted, other files are kept.
        """
        path = video.path
        self.on_stage("decoding", video.number)
        pipeline.tiles = Tiles(self.mesh.sp_group, self.reported("decoding", video, "tile"))
        (frames,) = pipeline.decode(latents)
        if frames is None:
            raise FloatingPointError(
                f"{path}: the video contains NaN or inf; try --dtype fp32 or another checkpoint"
            )
        if self.mesh.rank % self.mesh.sp_size == 0:
            self.on_stage("writing", video.number)
            for file in files_beside(path):  # an earlier video's
                if is_own(file):
                    file.unlink(missing_ok=True)
            write_video(path, frames, self.data.fps)
            if keep_latents:
                write_latents(path, latents[0])
            if settings:
                record = path.with_suffix(RECORD_SUFFIX)
                write_json(record, settings | {"vae_tile_size": tile_size_of(pipeline.vae)})
