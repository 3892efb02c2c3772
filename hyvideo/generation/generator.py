"""Sampling of the videos of a call: by generate.py, and for benchmarks and figures.

    checks -> conditions -> (encoders released) -> transformer -> latents -> mp4, latents and JSON

A video is complete once its JSON file is there, which is written last. Complete videos with the
same settings are skipped, so that a repeated command continues where an earlier one ended.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hyvideo.checks.layout import rank_problems
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.collectives import barrier
from hyvideo.distributed.parallelize import parallelize
from hyvideo.distributed.watchdog import Watchdog
from hyvideo.files.digests import digest_of, digest_weights
from hyvideo.files.files import PARTIAL, make_folder, remove_partial
from hyvideo.files.text import counted, lines_of
from hyvideo.generation.best_of import make_best_of
from hyvideo.generation.offloading import automatic_offloading
from hyvideo.generation.settings import GenerationSettings
from hyvideo.generation.step_cache import step_cache
from hyvideo.generation.step_caching import StepCaching
from hyvideo.generation.stored_latents import Sampled, stored
from hyvideo.generation.super_resolution import Refiner
from hyvideo.generation.video_sampler import STAGE, VideoSampler
from hyvideo.generation.videos import Video, is_complete
from hyvideo.loading import model_setup
from hyvideo.loading.gpu_driver import check_allocator
from hyvideo.loading.input_digests import digest_models
from hyvideo.loading.machine import check_compiler
from hyvideo.models.conditions import Conditions
from hyvideo.models.placement import Placements
from hyvideo.models.sizes import read_architecture
from hyvideo.models.versions import version_defaults
from hyvideo.pipelines.grpo_pipeline import GRPOPipeline
from hyvideo.records.progress_bar import print_stage, stage_bar
from hyvideo.records.stage_timer import peak_memory_gib
from hyvideo.settings import processes
from hyvideo.settings.identity import base_loras_of
from hyvideo.settings.reward_settings import given_reward_weights, reward_options
from hyvideo.settings.sampling import ODE
from hyvideo.settings.sections import DistributedSettings, ModelSettings
from hyvideo.settings.version_notes import generation_notes


class Generator:
    """Checks a call, then makes its videos: `make`.

    Raises ValueError for bad input before weights are read, and joins the other processes if they
    share videos.
    """

    def __init__(self, settings: GenerationSettings, videos: list[Video]):
        self.videos = videos
        # the frames of the settings are those of rollouts, which may be shorter
        self.config = config = settings.config.with_settings(
            sp_size=settings.sp_size, sample_n_frames=settings.sampling.frames
        )
        source = settings.source.with_initial_lora(config.optimizer.pretrained_lora_path)
        self.settings = settings = replace(settings, source=source)
        self.sampling = settings.sampling
        self.sizes = [(self.sampling.frames, video.height, video.width) for video in videos]
        self.kinds = model_setup.check_checkpoint(
            config, {"this call": [video.request for video in videos]}, self.sizes
        )
        self.refiner = None
        if settings.sr:
            self.refiner = Refiner(config.model, config.distributed, videos)
        if settings.caching:
            _check_cache(settings, settings.caching)
        self.schedule = self.sampling.schedule()
        source.check(config.model)
        self.device = _check_machine(config.model, config.distributed)
        self.mesh = ranks.Mesh(processes.rank(), processes.world_size(), settings.sp_size)
        # with best of n, all end together, because torchrun stops the others once one has failed
        if settings.sp_size > 1 or (settings.best_of > 1 and self.mesh.world_size > 1):
            self.mesh = ranks.start(
                settings.sp_size, self.device, timeout=ranks.UNEVEN_WORK_TIMEOUT
            )

    def make(self) -> list[str]:
        """Make this process's share of the videos, without those that are complete, and return the
        problems of the videos among whose candidates best of n could not choose.
        """
        mesh = self.mesh
        if mesh.is_main:
            for line in lines_of(generation_notes(self.config.model, self.sampling)):
                print(line, file=sys.stderr)
        frames, height, width = max(self.sizes, key=math.prod)
        largest = replace(self.sampling, frames=frames, height=height, width=width)
        self.offloading = self.settings.offloading or automatic_offloading(
            self.device, self.config, largest, has_scorers=self.settings.best_of > 1
        )
        self.placements = Placements.of_sampling(self.offloading)
        model = self.config.model
        base_loras = {name: digest_weights([path]) for name, path in base_loras_of(model).items()}
        self.weights_hash = digest_of(digest_models(model, self.kinds), base_loras)
        self.vae_weights = model_setup.vae_weights(model) if self.settings.keep_latents else None
        share = self.videos[mesh.replica :: mesh.num_replicas]
        pending = [video for video in share if not self._is_complete(video)]
        if self.settings.sp_size > 1:
            barrier(mesh)  # no process removes what another of its replica writes
        if len(pending) < len(share):
            print(
                f"{len(share) - len(pending)} of {len(share)} videos are complete with these "
                "settings and are kept; delete them to make them again",
                file=sys.stderr,
            )
        problems = self._make(pending) if pending else []
        if self.settings.best_of > 1:
            barrier(mesh)
        return problems

    def _is_complete(self, video: Video) -> bool:
        """Remove what a killed call has left of this video, and return whether an earlier one has
        made it with the same settings.
        """
        files = []
        if self.settings.keep_latents:
            files.append(video.latents)
        if self.settings.sr and self.settings.save_pre_sr_video:
            files.append(video.before_sr.path)
        remove_partial(video.path.parent, f"{video.path.stem}.")
        return is_complete(video, digest_of(self._settings_of(video)), files)

    def _settings_of(self, video: Video) -> dict:
        settings = self.settings.record_of(video) | {"weights_hash": self.weights_hash}
        settings["super_resolution"] = self.refiner.record(video) if self.refiner else None
        if self.settings.best_of > 1:
            settings["best_of"] = {
                "candidates": self.settings.best_of,
                "reward_model": self.config.reward.reward_model,
                "reward_weights": given_reward_weights(self.config.reward),
                "options_hash": digest_of(reward_options(self.config.reward)),
            }
        return settings

    def _make(self, videos: list[Video]) -> list[str]:
        """Make videos and return the problems of best of n."""
        folder = videos[0].path.parent
        make_folder(folder)
        self.best_of = None
        if self.settings.best_of > 1:  # the scorers are tried before other models are loaded
            self.best_of = make_best_of(
                self.config,
                self.settings.best_of,
                self.videos,  # all processes try the same prompt
                self.device,
                self.placements.scorers,
            )
        watchdog = Watchdog(self.mesh, self.config.distributed.report_after, unit="video")
        # Encoded prompts between stages are files: memory does not grow with the number of videos.
        # A repeated command removes those of a killed one by their name (`remove_partial`).
        stem = videos[0].path.stem
        between_stages = folder / f".{stem}.conditions-{self.mesh.rank}{PARTIAL}"
        with watchdog, _temporary_folder(between_stages):
            if not self.config.model.conditions_dir:
                self.config = self.config.with_settings(conditions_dir=str(between_stages))
            start = time.perf_counter()
            self._load(videos, watchdog.enter)
            loaded = time.perf_counter()
            problems = self._sample_and_write(videos)
        if self.mesh.is_main:
            each = (time.perf_counter() - loaded) / len(videos)
            print(
                f"{len(videos)} mp4 in {folder} by {self.config.model.transformer_version}: "
                f"{each:.2f} s each after {loaded - start:.1f} s of loading, "
                f"{peak_memory_gib(self.device):.2f} GiB peak memory"
            )
        return problems

    def _load(self, videos: list[Video], on_stage: Callable[..., None]) -> None:
        """Encode the prompts, release the encoders, and load the other models."""
        config = self.config
        print_stage(f"loading the text encoders and the VAE, for {counted(len(videos), 'prompt')}")
        self.encoder, vae = model_setup.load_encoder(config, self.device, self.placements)
        for video in stage_bar("encoding", "prompt", is_shown=self.mesh.is_main)(videos):
            on_stage("encoding", video.number)
            self._conditions(video)
            if self.refiner:
                self.refiner.encode(self.encoder, video)
        self.encoder(self.sampling.negative_requests)
        self.encoder.release()
        print_stage("loading the transformer")
        on_stage("loading")
        self.pipeline = self.settings.source.load(
            config,
            self.device,
            self.encoder,
            vae,
            self.kinds,
            placements=self.placements,
            sampling=self.sampling,
        )
        for transformer in self.pipeline.transformers:
            parallelize(
                transformer,
                self.mesh,
                compile=config.distributed.enable_compile == "true",
                is_hooked=True,
            )
        model_setup.place_transformers(self.pipeline, self.placements, self.device)
        for size in dict.fromkeys(self.sizes):
            on_stage("decoding of a test video")
            self.pipeline.try_decoding(*size)
        self.sampler = VideoSampler(
            config.data,
            self.mesh,
            self.settings.seed,
            self.settings.initial_noise,
            on_stage=on_stage,
            num_videos=self.settings.num_videos,
        )

    def _sample_and_write(self, videos: list[Video]) -> list[str]:
        """Write each video as soon as its final latents are known; return the problems of best of
        n.
        """
        finals = self._refined(videos) if self.refiner else self._sampled(videos)
        problems = []
        for video, sampled in finals:
            settings = self._settings_of(video)
            settings |= {"settings_hash": digest_of(settings), "problem": sampled.problem}
            # these change at most the rounding, so a repeated command may have others
            settings |= {"sp_size": self.settings.sp_size, "offloading": self.offloading}
            if self.best_of:
                settings["best_of"] = settings["best_of"] | sampled.record
            if sampled.problem:
                problems.append(f"{video.path}: {sampled.problem}")
            self.sampler.write(
                self.pipeline,
                sampled.latents,
                video,
                settings,
                vae_weights=self.vae_weights,
            )
            video.base_latents.unlink(missing_ok=True)
        return problems

    def _sampled(self, videos: list[Video]) -> Iterator[tuple[Video, Sampled]]:
        """Yield the final latents of each video."""
        print_stage(f"sampling {counted(len(videos), 'video')}")
        for video in stage_bar("sampling", "video", is_shown=self.mesh.is_main)(videos):
            yield video, self._sample(video)

    def _refined(self, videos: list[Video]) -> Iterator[tuple[Video, Sampled]]:
        """Yield the refined latents of each video, once the base model has sampled all of them.

        The latents of the base model are hidden files in the meantime, which a repeated command
        uses.
        """
        for video in stage_bar("sampling", "video", is_shown=self.mesh.is_main)(videos):
            base = self._base(video)
            if self.settings.save_pre_sr_video:
                self.sampler.write(self.pipeline, base.latents, video.before_sr)
        self.sampler.on_stage("loading of super-resolution", 0)
        self.refiner.load(self.pipeline, self.placements, self.mesh)
        for video in stage_bar(STAGE, "video", is_shown=self.mesh.is_main)(videos):
            self.sampler.on_stage(STAGE, video.number)
            base = self._base(video)
            latents = self.refiner.refine(base.latents, video, self.sampler, self.encoder)
            yield video, replace(base, latents=latents)

    def _base(self, video: Video) -> Sampled:
        """Return the latents of the base model, from their file if there is one."""
        key = digest_of(self._settings_of(video))
        return stored(video.base_latents, key, lambda: self._sample(video))

    def _sample(self, video: Video) -> Sampled:
        conditions = self._conditions(video)

        def candidate(number: int) -> Tensor:
            # candidate 0 has the noise that the video has without candidates
            stage = (f"candidate {number}",) if number else ()
            return self.sampler.sample(
                self.pipeline, self.schedule, video, conditions, *stage, within=self._cached
            )

        if self.best_of is None:
            return Sampled(candidate(0))
        return self.best_of.choose(candidate, self.pipeline, video.request.prompt)

    def _cached(self, pipeline: GRPOPipeline) -> AbstractContextManager:
        """Return the context in which steps are cached, if they are."""
        caching = self.settings.caching
        if caching is None:
            return nullcontext()
        sampling = pipeline.sampling
        num_rows = 1 if sampling.batched_forward else sampling.guidance.num_branches(1.0)
        return step_cache(pipeline.transformer, caching, num_rows)

    def _conditions(self, video: Video) -> Conditions:
        return self.encoder([video.request], (self.sampling.frames, video.height, video.width))


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[None]:
    """Context manager that creates a folder, also in place of a killed process's, and removes it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_machine(model: ModelSettings, distributed: DistributedSettings) -> torch.device:
    """Return the device of this process. Raises ValueError if it cannot sample with these settings."""
    for problem in rank_problems(processes.world_size(), distributed.sp_size):
        raise ValueError(problem)
    if model.num_threads:
        torch.set_num_threads(model.num_threads)
    if distributed.deterministic:
        model_setup.make_deterministic()
    device = model_setup.choose_device(model.device, processes.local_rank())
    check_allocator(device)
    model_setup.choose_attention(model, device, with_gradient=False)
    check_compiler(distributed)
    return device


def _check_cache(settings: GenerationSettings, caching: StepCaching) -> None:
    """Raise ValueError if steps cannot be cached with these settings."""
    model = settings.config.model
    kind = version_defaults(model.transformer_version).kind
    problems = {
        "--stochastic: the SDE samples rollouts, which run all blocks": settings.sampling.sampler
        != ODE,
        "a step-distilled version": kind == "step_distilled",
        "a version of two experts": settings.sampling.boundary is not None,
        "guidance_interval: each step must have the same branches": (
            settings.sampling.guidance_interval
        ),
    }
    for problem in (text for text, applies in problems.items() if applies):
        raise ValueError(f"--enable_cache cannot be combined with {problem}. Remove one of the two")
    num_blocks = read_architecture(
        model.pretrained_model_root, model.transformer_version
    ).num_layers
    caching.check(settings.sampling.steps, num_blocks)
