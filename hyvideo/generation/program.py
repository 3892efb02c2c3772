"""Videos of generate.py: from the values of its flags to the files."""

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from hyvideo.checkpoints.format import saved_lora, saved_policy
from hyvideo.checks.rules import check_evaluation, check_sampling, with_local_weights
from hyvideo.data.images import bucket_sizes, nearest_size, read_image, size_of_aspect_ratio
from hyvideo.files.run_folder import Lease
from hyvideo.files.text import counted, quote
from hyvideo.generation import generation
from hyvideo.generation.flags import CACHING, SPEED
from hyvideo.generation.generation import Source, resolve_sampling
from hyvideo.generation.settings import GenerationSettings
from hyvideo.generation.step_caching import StepCaching
from hyvideo.loading.run_settings import settings_of_run
from hyvideo.models.sizes import family_of_version
from hyvideo.models.versions import FAMILIES, version_defaults
from hyvideo.planning.generation import memory_lines
from hyvideo.records.progress_bar import print_stage
from hyvideo.report.gallery import PAGE_FILE, write_gallery
from hyvideo.settings import processes
from hyvideo.settings.command_line import read_settings
from hyvideo.settings.config import Config
from hyvideo.settings.reference_flags import print_ignored
from hyvideo.settings.sampling import Sampling


def make_videos(options: argparse.Namespace) -> list[str]:
    """Make the videos of checked flags; return the problems of those that best of n could not
    choose.
    """
    requests = generation.make_and_read_requests(
        options.prompt, options.valid_video_csv, options.image_path, options.last_image_path
    )
    settings = generation_settings(options, has_images=any(request.image for request in requests))
    config = settings.config
    rewriter = None
    if options.rewrite != "false":
        from hyvideo.rewards.prompt_rewriting import read_rewriter

        rewriter = read_rewriter(options.rewrite)
    model = config.model
    check_noise(options, requests, model.pretrained_model_root, model.transformer_version)
    output = options.output_path
    folder = output.parent if output.suffix == ".mp4" else output
    root = model.pretrained_model_root
    check_sampling(settings.sampling, root=root, version=model.transformer_version, output=folder)
    if options.best_of > 1:
        check_evaluation(config.reward, root=root, output=folder)
    if rewriter and rewriter.csv:
        if os.path.realpath(rewriter.csv) in map(os.path.realpath, options.valid_video_csv):
            raise ValueError(
                "csv of --rewrite must be another file than --valid_video_csv, whose other columns "
                f"it would lose, got {quote(rewriter.csv)}"
            )
        rewriter.write(requests)
        return []
    settings = replace(settings, config=with_local_weights(config))
    sizes = {request: size_of(options, settings, request.image) for request in requests}
    videos = generation.list_videos(
        sizes, [r for r in requests for _ in range(options.num_videos)], output
    )
    sampling = settings.sampling
    print_stage(
        f"{counted(len(videos), 'video')} of {sampling.frames} frames by "
        f"{model.transformer_version}, {sampling.steps} steps, guidance scale "
        f"{sampling.guidance_scale:g}, to {output}"
    )
    print_stage("importing torch and the models")
    from hyvideo.distributed import mesh as ranks  # after the checks: these import torch
    from hyvideo.generation.generator import Generator

    print_stage("checking the files of the model")
    generator = Generator(settings, videos)
    if rewriter:  # after all checks, because it calls a service
        requests = rewriter.write(requests)
        videos = [
            replace(video, request=requests[video.number // options.num_videos]) for video in videos
        ]
        generator = Generator(settings, videos)
    # calls with one named mp4 file may share a folder
    owns_folder = output == folder and processes.rank() == 0
    with Lease(folder) if owns_folder else nullcontext():
        problems = generator.make()
    ranks.stop()
    write_page(options, folder, videos)
    return problems


def sampling_of(options: argparse.Namespace, has_images: bool) -> tuple[Config, Sampling]:
    """Return the settings of a YAML file, of a checkpoint's run or of a version, overridden by the
    flags, and how videos are sampled with them.
    """
    options.checkpoint_path = options.checkpoint_path and saved_policy(options.checkpoint_path)
    options.lora_path = options.lora_path and saved_lora(options.lora_path)
    file_settings = {} if options.config is None else read_settings(options.config)
    if options.checkpoint_path and options.config is None:
        file_settings, options.config = settings_of_run(options.checkpoint_path)
        if options.config and processes.rank() == 0:
            print(f"using the settings of the checkpoint's run: {options.config}", file=sys.stderr)
    given = {setting: getattr(options, flag) for setting, flag in options.flags.items()}
    given["enable_compile"] = "false"
    for flag, (setting, value) in SPEED.items():
        if getattr(options, flag):
            given[setting], options.flags[setting] = value, flag
    kinds = {"cfg_distilled": options.cfg_distilled, "step_distilled": options.enable_step_distill}
    return resolve_sampling(file_settings, given, options.resolution, has_images, kinds)


def size_of(
    options: argparse.Namespace, settings: GenerationSettings, image: str | None
) -> tuple[int, int]:
    """Return height and width in pixels: from the flags, from the version and aspect ratio, or from
    the run.
    """
    if options.height is not None:
        return options.height, options.width
    version = version_defaults(settings.config.model.transformer_version)
    resolution = options.resolution or version.resolution
    sizes = version.sizes or (bucket_sizes(resolution) if resolution else None)
    if options.aspect_ratio and not sizes:
        raise ValueError("--aspect_ratio needs --resolution: this model has no default resolution")
    if not sizes or (options.config and not options.resolution and not options.aspect_ratio):
        return settings.sampling.height, settings.sampling.width
    if image and not options.aspect_ratio:
        picture = read_image(image)
        return nearest_size(picture.height, picture.width, sizes)
    return size_of_aspect_ratio(options.aspect_ratio or "16:9", sizes)


def caching_of(options: argparse.Namespace) -> StepCaching | None:
    """Return the step caching of the flags, or None; flags without ``--enable_cache`` are named."""
    given = {name: getattr(options, name) for name in CACHING}
    given = {name: value for name, value in given.items() if value is not None}
    if options.enable_cache:
        return StepCaching(**given)
    if given:
        print_ignored(given, "enable_cache is not set")
    return None


def check_noise(options: argparse.Namespace, requests: list, root: str, version: str) -> None:
    """Raise ValueError for an initial noise that makes videos identical or that a family lacks."""
    is_reference = options.initial_noise == "reference"
    has_fixed_noise = is_reference or any(request.seed is not None for request in requests)
    if options.num_videos > 1 and has_fixed_noise and options.initial_noise != "validation":
        raise ValueError(
            "--num_videos must be 1 with --initial_noise reference or seeds in the CSV, got "
            f"{options.num_videos}: the videos of a prompt would be identical; write one row with "
            "its own seed for each"
        )
    family = family_of_version(root, version)
    if is_reference and family != FAMILIES[0]:
        raise ValueError(
            f"--initial_noise reference needs a version of the family {FAMILIES[0]}, got one of "
            f"{family or 'no known family'}"
        )


def generation_settings(options: argparse.Namespace, has_images: bool) -> GenerationSettings:
    """Return how the videos are made."""
    caching = caching_of(options)
    config, sampling = sampling_of(options, has_images)
    source = Source(options.checkpoint_path, options.lora_path, options.lora_scale)
    return GenerationSettings(
        config,
        sampling,
        source,
        seed=options.seed,
        offloading=None if options.offloading == "auto" else options.offloading,
        initial_noise=options.initial_noise,
        num_videos=options.num_videos,
        sp_size=options.sp_size,
        caching=caching,
        sr=options.sr,
        save_pre_sr_video=options.save_pre_sr_video,
        keep_latents=options.keep_latents,
        best_of=options.best_of,
    )


def print_memory(options: argparse.Namespace) -> None:
    """Print the memory of each way of offloading for a video of this size."""
    settings = generation_settings(options, has_images=bool(options.image_path))
    height, width = size_of(options, settings, options.image_path)
    sampling = replace(settings.sampling, height=height, width=width)
    print("\n".join(memory_lines(settings.config, sampling, options.print_memory)))


def write_page(options: argparse.Namespace, folder: Path, videos: list) -> None:
    """Write the page of several videos, from the first process of each replica that has one."""
    replica, place = divmod(processes.rank(), options.sp_size)
    has_video = place == 0 and replica < len(videos)
    if has_video and (len(videos) > 1 or (options.output_path / PAGE_FILE).is_file()):
        write_gallery(folder)
