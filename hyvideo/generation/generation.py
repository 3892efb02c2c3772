"""Sampling of videos from prompts and images with a base model, a checkpoint of a run or a LoRA,
for generate.py.

    requests -> sizes -> checks -> conditions -> (encoders released) -> transformer -> latents -> mp4 and json

Without ``sde_type`` the sampler is that of the validation, which is the ODE unless the model
samples with noise; with it, it samples a rollout as in training.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hyvideo.data.digests import digest_weights
from hyvideo.data.files import make_folder
from hyvideo.data.images import read_image
from hyvideo.data.prompts import Request, check_prompt, read_requests
from hyvideo.data.text import lines_of, quote
from hyvideo.distributed import mesh as ranks
from hyvideo.distributed.checkpoint_loading import DIGESTS
from hyvideo.distributed.watchdog import Watchdog
from hyvideo.generation.best_of import make_best_of
from hyvideo.generation.offloading import place, resolve
from hyvideo.generation.super_resolution import Refiner
from hyvideo.generation.video_sampler import Video, VideoSampler, files_beside, is_own
from hyvideo.models import loading
from hyvideo.models.lora import add_lora, check_lora
from hyvideo.models.registry import register
from hyvideo.models.sizes import read_architecture
from hyvideo.models.step_cache import StepCache, StepCaching
from hyvideo.models.versions import RELEASED, version_defaults, version_for
from hyvideo.pipelines.condition_encoder import ConditionEncoder
from hyvideo.pipelines.grpo_pipeline import DTYPES, GRPOPipeline
from hyvideo.records.progress_bar import stage_bar
from hyvideo.records.stage_timer import peak_memory_gib
from hyvideo.report.gallery import PAGE_FILE, check_page
from hyvideo.schedulers.schedule import Schedule
from hyvideo.schedulers.transitions import parse_sigmas
from hyvideo.settings import processes
from hyvideo.settings.command_line import read_settings
from hyvideo.settings.config import Config
from hyvideo.settings.offloading import AUTO, Offloading
from hyvideo.settings.rules import layout_problems
from hyvideo.settings.sections import DistributedSettings, ModelSettings, RolloutSettings
from hyvideo.settings.version_notes import generation_notes
from hyvideo.training import model_setup, saved_policy
from hyvideo.training.gpu_driver import check_allocator
from hyvideo.training.machine import check_compiler

MINIATURE = "configs/miniature.yaml"


@dataclass(frozen=True)
class Source:
    """Policy that generates the videos: a checkpoint of a run, a LoRA, both, or the base model of
    the config.
    """

    checkpoint: Path | None = None
    lora: Path | None = None
    lora_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.checkpoint and not self.checkpoint.exists():
            raise ValueError(
                "a policy must be a checkpoint of a run or a transformer folder with a config.json: "
                f"{self.checkpoint} does not exist"
            )
        if self.lora_scale != 1.0 and not (self.lora and math.isfinite(self.lora_scale)):
            raise ValueError(
                f"--lora_scale must be a finite number and needs --lora_path, got {self.lora_scale}"
            )

    @cached_property
    def policy_hash(self) -> str | None:
        """Digest of the checkpoint or LoRA that was given by path; None for the base model and for
        a folder of ``save_pretrained``.
        """
        paths = []
        if self.checkpoint and (self.checkpoint / DIGESTS).is_file():
            paths.append(self.checkpoint / DIGESTS)
        if self.lora:
            paths.append(self.lora)
        return digest_weights(paths) if paths else None

    def with_initial_lora(self, lora_path: str) -> "Source":
        """Return the source; if it is the base model, with the initial LoRA of the run's settings,
        if there is one.
        """
        return (
            self
            if self.checkpoint or self.lora or not lora_path
            else replace(self, lora=Path(lora_path))
        )

    def check(self, model: ModelSettings, negative_requests: list[Request]) -> None:
        """Raise ValueError for files that do not fit the model, or a checkpoint trained with
        another negative prompt.

        The files of a checkpoint are compared with its digests (`saved_policy.verify`).
        """
        root, version = model.pretrained_model_root, model.transformer_version
        if self.checkpoint:
            saved_policy.check_policy(root, version, self.checkpoint)
            trained = saved_policy.negative_prompt(self.checkpoint)
            for given in (
                request.prompt
                for request in negative_requests
                if trained not in (None, request.prompt)
            ):
                raise ValueError(
                    f"checkpoint {self.checkpoint} was trained with negative_prompt "
                    f"{quote(trained)}, got {quote(given)}; set --negative_prompt "
                    f"{quote(trained)}, or export it (scripts.export) first"
                )
        if self.lora and self.checkpoint and saved_policy.is_lora(self.checkpoint):
            rule = f"--lora_path cannot be added to the LoRA of the checkpoint {self.checkpoint}"
            raise ValueError(
                f"{rule}; merge both with scripts.export --merge, and pass the result as checkpoint"
            )
        if self.lora:
            check_lora(
                loading.transformer_on_meta(root, version), saved_policy.read_saved_lora(self.lora)
            )

    def load(
        self,
        config: Config,
        device: torch.device,
        encoder: ConditionEncoder,
        vae: nn.Module,
        kinds: frozenset[str],
        *,
        weights_device: torch.device | None = None,
    ) -> GRPOPipeline:
        """Load the pipeline of the policy, with weights in its compute precision."""
        is_overwritten = self.checkpoint is not None and not saved_policy.is_lora(self.checkpoint)
        pipeline = model_setup.load_pipeline(
            config,
            device,
            kinds=kinds,
            weights_dtype=DTYPES[config.model.dtype],
            is_overwritten=is_overwritten,
            encoder=encoder,
            vae=vae,
            weights_device=weights_device,
        )
        if self.checkpoint:
            saved_policy.load_into(pipeline.transformer, self.checkpoint)
        if self.lora:
            add_lora(
                pipeline.transformer, saved_policy.read_saved_lora(self.lora), scale=self.lora_scale
            )
        return pipeline


def make_and_read_requests(prompts: list[str], image: str | None, csvs: list[str]) -> list[Request]:
    """Return requests for prompts that share an image, then requests of CSV files.

    Raises ValueError for invalid input.
    """
    for number, prompt in enumerate(prompts, start=1):
        check_prompt(prompt, f"as number {number} of --prompt")
    requests = [Request(prompt, image) for prompt in prompts] + read_requests(*csvs)
    for path in dict.fromkeys(request.image for request in requests if request.image):
        read_image(path)
    return requests


def sampling_config(
    from_file: dict,
    settings: dict,
    resolution: str | None,
    has_images: bool,
    kinds: dict[str, bool | None],
) -> Config:
    """Return the settings of a file, or without one the defaults of the version, overridden by
    ``settings``.

    The version is given or follows from the resolution. ``kinds`` maps a kind of version to whether
    it is required (None: either); raises ValueError for another version. The settings of a run give
    frames, size, shift and guidance of its validation, or of its rollouts if ``settings`` has
    ``sde_type``. Without a run, the version gives the frames.
    """
    register(settings.get("family", from_file.get("family", "")))
    if resolution and "transformer_version" not in settings:
        kind = next((kind for kind, is_required in kinds.items() if is_required), "base")
        settings = settings | {
            "transformer_version": version_for(resolution, "i2v" if has_images else "t2v", kind)
        }
    if settings.get("sigmas") and "validation_steps" not in settings:
        settings = settings | {"validation_steps": len(parse_sigmas(settings["sigmas"]))}
    # a given shift replaces the levels of a run or a version
    if "shift" in settings and "sigmas" not in settings:
        settings = settings | {"sigmas": ""}
    if not from_file and not settings.keys() & {"pretrained_model_root", "transformer_version"}:
        from_file = read_settings(MINIATURE)
    config = Config().with_settings(**from_file | settings).resolved()
    version = version_defaults(config.model.transformer_version)
    for name, is_required in kinds.items():
        if is_required not in (None, version.kind == name):
            known = ", ".join(version.name for version in RELEASED.values() if version.kind == name)
            raise ValueError(
                f"transformer_version must {'' if is_required else 'not '}be {name} with these "
                f"flags, got {config.model.transformer_version}; released {name} versions: {known}"
            )
    # the default of sample_n_frames is for rollouts, which may be short to save time
    if not from_file:
        config = config.with_settings(sample_n_frames=version.num_frames)
    if "sde_type" not in settings:
        config = config.sampled_as_validation()
    config = config.with_settings(**settings)
    if (
        "sigmas" not in settings
        and len(parse_sigmas(config.rollout.sigmas)) != config.record.validation_steps
    ):
        return config.with_settings(sigmas=None)  # levels of another number of steps
    return config


def list_videos(
    sizes: dict[Request, tuple[int, int]], requests: list[Request], output: Path
) -> list[Video]:
    """List the videos of the requests in order: 0000.mp4, 0001.mp4, ... in a folder, or one mp4
    file by name.

    Raises ValueError if a folder or a file that is not of a video has the name of a file that is
    written.
    """
    if output.suffix == ".mp4" and len(requests) > 1:
        raise ValueError(f"--output_path must be a folder for {len(requests)} videos, got {output}")
    check_page(output / PAGE_FILE)
    videos = [
        Video(
            request,
            *sizes[request],
            number,
            output if output.suffix == ".mp4" else output / f"{number:04d}.mp4",
        )
        for number, request in enumerate(requests)
    ]
    files = [output / PAGE_FILE]
    for video in videos:
        files += [video.path, *files_beside(video.path)]
    for file in files:
        if file.is_dir():
            raise ValueError(
                f"a file cannot replace the folder {quote(file)}; move it, or choose another folder"
            )
    for video in videos:
        for file in files_beside(video.path):
            if not is_own(file):
                raise ValueError(
                    f"{quote(file)} would be replaced with the video {video.path.name}, but does "
                    "not have settings or latents of a video; move it, or choose another name"
                )
    return videos


def generate(
    config: Config,
    videos: list[Video],
    *,
    source: Source,
    seed: int,
    is_stochastic: bool,
    offloading: Offloading = AUTO,
    initial_noise: str = "default",  # or "reference"
    sp_size: int = 1,
    caching: StepCaching | None = None,
    sr: bool | None = None,
    save_pre_sr_video: bool | None = None,
    keep_latents: bool | None = None,
    best_of: int = 1,  # candidates of each video
    only_checks: bool = False,
) -> None:
    """Generate the videos, each with a JSON file of its settings; ``sp_size`` processes of torchrun
    share each video.

    Uses ``sde_type`` and ``eta`` only if ``is_stochastic``. Raises ValueError for bad input before
    weights are read.
    """
    config = config.with_settings(sp_size=sp_size)
    num_steps = config.record.validation_steps
    sizes = [(config.data.sample_n_frames, video.height, video.width) for video in videos]
    needs = model_setup.check_checkpoint(
        config, {"this call": [video.request for video in videos]}, sizes
    )
    refiner = Refiner(config.model, config.distributed, videos, save_pre_sr_video) if sr else None
    new_cache = caching and _checked_cache(
        caching, config.model, config.rollout, num_steps, is_stochastic
    )
    schedule = _schedule(config, is_stochastic)
    source = source.with_initial_lora(config.optimizer.pretrained_lora_path)
    source.check(config.model, config.negative_requests)
    device, mesh = _start(config.model, config.distributed)
    if only_checks:
        return
    if mesh.is_main:
        for line in lines_of(generation_notes(config)):
            print(line, file=sys.stderr)
    offloading = resolve(offloading, device)
    chooser = None
    if best_of > 1:
        requests = [video.request for video in videos]
        chooser = make_best_of(
            config, best_of, requests, device, offload=bool(offloading.offloading)
        )
    config = config.with_settings(vae_offload=offloading.offloading)
    folder = videos[0].path.parent
    make_folder(folder)
    local = videos[mesh.replica :: mesh.num_replicas]
    watchdog = Watchdog(mesh, config.distributed.watchdog_seconds, unit="video")
    # Encoded prompts and latents between stages are files: memory does not grow with the number of
    # videos.
    with watchdog, tempfile.TemporaryDirectory(prefix=".generate-", dir=folder) as between_stages:
        if not config.model.conditions_dir:
            config = config.with_settings(conditions_dir=between_stages)
        start = time.perf_counter()
        bar = partial(stage_bar, is_shown=mesh.is_main)
        encoder, vae = model_setup.load_encoder(
            config, device, group_offload=offloading.group_offloading
        )
        for video in bar("encoding", "prompt")(local):
            watchdog.enter("encoding", video.number)
            encoder([video.request], height=video.height, width=video.width)
            if refiner:
                refiner.encode(encoder, video)
        encoder(config.negative_requests)
        encoder.release()  # before the transformer is loaded
        watchdog.enter("loading")
        home = torch.device("cpu") if offloading.group_offloading else device
        pipeline = source.load(config, device, encoder, vae, needs, weights_device=home)
        place(
            pipeline.transformer, mesh, device, config.distributed, offloading, caching is not None
        )
        for size in dict.fromkeys(sizes):
            watchdog.enter("decoding of a test video")
            pipeline.try_decoding(*size)
        loaded = time.perf_counter()
        sampler = VideoSampler(config.data, mesh, seed, initial_noise, on_stage=watchdog.enter)

        choices: dict[int, dict] = {}  # what is recorded of the candidates, by number of the video

        def sample(video: Video) -> Tensor:
            conditions = encoder([video.request], height=video.height, width=video.width)
            candidate = partial(
                sampler.candidate, pipeline, schedule, video, conditions, new_cache=new_cache
            )
            if chooser is None:
                return candidate(0)
            choice = chooser.choose(candidate, pipeline, video.request.prompt)
            choices[video.number] = choice.record
            return choice.latents

        finals = map(sample, bar("videos", "video")(local))
        if refiner:
            finals = refiner.refine(
                zip(finals, local),
                pipeline,
                sampler,
                offloading,
                encoder,
                folder=Path(between_stages),
            )
        for latents, video in zip(finals, local):
            settings = video_settings(config, video, source, seed, is_stochastic)
            settings["initial_noise"] = initial_noise
            settings["sp_size"] = sp_size
            settings["step_caching"] = caching and asdict(caching)
            settings.update(asdict(offloading))
            settings["super_resolution"] = refiner and refiner.record(video)
            if chooser:
                settings["best_of"] = choices[video.number]
            sampler.write(pipeline, latents, video, settings, keep_latents=bool(keep_latents))
    if mesh.is_main and local:
        each = (time.perf_counter() - loaded) / len(local)
        print(
            f"{len(local)} mp4 in {folder}: {each:.2f} s each after {loaded - start:.1f} s of "
            f"loading, {peak_memory_gib(device):.2f} GiB peak memory"
        )


def _schedule(config: Config, is_stochastic: bool) -> Schedule:
    """Return the steps of the ODE, or of the config's sampler."""
    num_steps = config.record.validation_steps
    if is_stochastic:
        stochastic = config.with_settings(grpo_sampling_steps=num_steps)
        return stochastic.sampling.schedule()
    return Schedule.ode(num_steps, config.rollout.shift, config.rollout.sigmas)


def _start(
    model: ModelSettings, distributed: DistributedSettings
) -> tuple[torch.device, ranks.Mesh]:
    """Return the device of this process and its place among the processes, which it joins if they
    share videos.
    """
    for problem in layout_problems(processes.world_size(), distributed.sp_size):
        raise ValueError(problem)
    if distributed.deterministic:
        model_setup.make_deterministic()
    device = model_setup.choose_device(model.device, processes.local_rank())
    check_allocator(device)
    model_setup.choose_attention(model, device, with_gradient=False)
    check_compiler(distributed)
    if distributed.sp_size == 1:
        return device, ranks.Mesh(processes.rank(), processes.world_size(), 1)
    return device, ranks.start(distributed.sp_size, device, timeout=ranks.UNEVEN_WORK_TIMEOUT)


def _checked_cache(
    caching: StepCaching,
    model: ModelSettings,
    rollout: RolloutSettings,
    num_steps: int,
    is_stochastic: bool,
) -> Callable[[], StepCache]:
    """Return the constructor of a video's step cache.

    Raises ValueError if it cannot be used with these settings.
    """
    problems = {
        "--stochastic: the SDE samples rollouts, which run all blocks": is_stochastic,
        "a step-distilled version": version_defaults(model.transformer_version).kind
        == "step_distilled",
        "guidance_interval: each step must have the same branches": rollout.guidance_interval,
    }
    for problem in (text for text, applies in problems.items() if applies):
        raise ValueError(f"--enable_cache cannot be combined with {problem}. Remove one of the two")
    num_blocks = read_architecture(
        model.pretrained_model_root, model.transformer_version
    ).num_layers
    caching.check(num_steps, num_blocks)
    return partial(StepCache, caching, caching.num_skipped(num_blocks))


def video_settings(
    config: Config, video: Video, source: Source, seed: int, is_stochastic: bool
) -> dict:
    """Return the content of the JSON file beside a video: everything needed to reproduce it."""
    return {
        "prompt": video.request.prompt,
        "original_prompt": video.request.original_prompt,
        "image": video.request.image,
        "seed": video.request.seed_or(seed),
        "number": video.number,
        "model": config.model.pretrained_model_root,
        "version": config.model.transformer_version,
        "checkpoint": str(source.checkpoint) if source.checkpoint else None,
        "lora": str(source.lora) if source.lora else None,
        "lora_scale": source.lora_scale if source.lora else None,
        "policy_hash": source.policy_hash,
        "steps": config.record.validation_steps,
        "shift": config.rollout.shift,
        "sigmas": config.rollout.sigmas,
        "guidance_scale": config.rollout.cfg_scale,
        "guidance_interval": config.rollout.guidance_interval,
        "negative_prompt": config.data.negative_prompt if config.num_branches == 2 else None,
        "sde_type": config.rollout.sde_type if is_stochastic else None,
        "eta": config.rollout.eta if is_stochastic else 0.0,
        "frames": config.data.sample_n_frames,
        "height": video.height,
        "width": video.width,
        "fps": config.data.fps,
        "dtype": config.model.dtype,
        "use_sageattn": config.model.attention_kernel == "sage",
        "enable_torch_compile": config.distributed.enable_compile == "true",
        "vae_dtype": config.model.vae_dtype,
    }
