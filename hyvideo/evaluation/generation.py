"""Videos from prompts and images, by a base model, a checkpoint of a run, or a LoRA: what generate.py does.

    requests -> sizes -> checks -> conditions -> (encoders let go) -> transformer -> latents -> mp4 and json

One sampler serves all: without ``sde_type`` it walks the ODE, with it a rollout as training makes them.
"""

import gc
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from hyvideo.config import processes
from hyvideo.config.settings import Config
from hyvideo.data.prompts import Request
from hyvideo.data.randomness import normal
from hyvideo.data.videos import write_video
from hyvideo.models import loading
from hyvideo.models.lora import add_lora, check_lora, read_lora
from hyvideo.pipelines.conditions import Conditions
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import DTYPES, HunyuanVideoGRPOPipeline
from hyvideo.records.run_files import peak_memory_gib, write_json
from hyvideo.training import saved_policy
from hyvideo.training.model_setup import RequiredEncoders, check_checkpoint, choose_device, load_encoder, load_pipeline


@dataclass(frozen=True)
class Video:
    """One video to make."""

    request: Request
    height: int
    width: int
    number: int  # among all videos of the call; with the seed it decides the noise
    path: Path


@dataclass(frozen=True)
class Source:
    """Which policy makes the videos; the base model of the config without either."""

    checkpoint: Path | None = None
    lora: Path | None = None
    lora_scale: float = 1.0


def generate(config: Config, videos: list[Video], *, source: Source, seed: int, is_stochastic: bool) -> None:
    """Makes the videos, each with a JSON file of its settings; several processes of torchrun share them.

    Args:
        config: ``validation_steps`` is the number of denoising steps; ``sde_type`` and ``eta`` count if
            ``is_stochastic``.

    Raises: ValueError for what cannot be used, before any weights are read.
    """
    root, version = config.model.pretrained_model_root, config.model.transformer_version
    needs = RequiredEncoders.of(video.request for video in videos)
    check_checkpoint(config, needs, [(video.height, video.width) for video in videos])
    if source.checkpoint:
        saved_policy.check_policy(root, version, source.checkpoint)
    lora = read_lora(source.lora) if source.lora else None
    if lora:
        check_lora(loading.transformer_without_memory(root, version), lora)
    device = choose_device(config.model.device, processes.local_rank())
    for folder in {video.path.parent for video in videos}:
        folder.mkdir(parents=True, exist_ok=True)
    own = videos[processes.rank() :: processes.world_size()]

    start = time.perf_counter()
    encoder, vae = load_encoder(config, device)
    conditions = _encode(encoder, own)
    if config.num_branches == 2:
        encoder([Request("")])
    encoder.release()  # before the transformer comes
    gc.collect()
    dtype = DTYPES[config.model.dtype]
    pipeline = load_pipeline(
        config,
        device,
        encoder=encoder,
        vae=vae,
        trained=needs,
        weights_dtype=dtype,
        is_overwritten=source.checkpoint is not None and saved_policy.is_full_checkpoint(source.checkpoint),
    )
    if source.checkpoint:
        saved_policy.load_into(pipeline.transformer, source.checkpoint)
    if lora:
        add_lora(pipeline.transformer, lora, scale=source.lora_scale)
    pipeline = pipeline.with_steps(config.record.validation_steps)
    loaded = time.perf_counter()
    for video, condition in zip(tqdm(own, unit="video", disable=processes.rank() > 0), conditions):
        _make(pipeline, config, video, condition, seed=seed, is_stochastic=is_stochastic)
        write_json(video.path.with_suffix(".json"), _settings(config, video, source, seed, is_stochastic))
    _report(own, loaded - start, time.perf_counter() - loaded, device)


def _encode(encoder, videos: Iterable[Video]) -> list[Conditions]:
    return [encoder([video.request], height=video.height, width=video.width) for video in videos]


def _make(
    pipeline: HunyuanVideoGRPOPipeline,
    config: Config,
    video: Video,
    conditions: Conditions,
    *,
    seed: int,
    is_stochastic: bool,
) -> None:
    shape = pipeline.latent_shape(config.data.sample_n_frames, video.height, video.width)
    device = pipeline.device
    noise = normal(shape, seed, "generate", video.number)[None].to(device)
    conditions = conditions.to(device)

    def with_progress(steps):
        is_shown = processes.rank() == 0 and len(steps) > 1
        return tqdm(steps, desc=video.path.name, unit="step", leave=False, disable=not is_shown)

    def step_noise(step: int) -> torch.Tensor:
        return normal(shape, seed, "generate", video.number, step)[None].to(device)

    if is_stochastic:
        latents = pipeline.sample(conditions, noise, step_noise, with_progress=with_progress).final
    else:
        latents = pipeline.sample_ode(conditions, noise, with_progress=with_progress)
    (frames,) = pipeline.decode(latents)
    if frames is None:
        raise FloatingPointError(f"the video for {video.path} is not finite; try --dtype fp32 or another checkpoint")
    write_video(video.path, frames, config.data.fps)


def _settings(config: Config, video: Video, source: Source, seed: int, is_stochastic: bool) -> dict:
    """All that makes the same video again."""
    return {
        **asdict(video.request),
        "seed": seed,
        "number": video.number,
        "model": config.model.pretrained_model_root,
        "version": config.model.transformer_version,
        "checkpoint": str(source.checkpoint) if source.checkpoint else None,
        "lora": str(source.lora) if source.lora else None,
        "lora_scale": source.lora_scale if source.lora else None,
        "steps": config.record.validation_steps,
        "shift": config.rollout.shift,
        "guidance_scale": config.rollout.cfg_scale,
        "sde_type": config.rollout.sde_type if is_stochastic else None,
        "eta": config.rollout.eta if is_stochastic else 0.0,
        "frames": config.data.sample_n_frames,
        "height": video.height,
        "width": video.width,
        "fps": config.data.fps,
        "dtype": config.model.dtype,
        "vae_dtype": config.model.vae_dtype,
    }


def _report(videos: list[Video], loading: float, sampling: float, device: torch.device) -> None:
    if processes.rank() == 0 and videos:
        print(
            f"{len(videos)} videos in {videos[0].path.parent}: {sampling / len(videos):.2f} s each "
            f"after {loading:.1f} s of loading, {peak_memory_gib(device):.2f} GiB at most"
        )
