"""Generate videos from prompts with a base model, a checkpoint of a training run, or a LoRA.

    generate.py --config configs/miniature.yaml --prompt "a red circle moves up"
    generate.py --checkpoint_path outputs/RUN/checkpoints/000030 --prompt "a red circle moves up"

A checkpoint is sampled with the settings of its run. With HunyuanVideo-1.5 in ./ckpts:

    generate.py --resolution 480p --prompt "a cat jumps"                              text to video
    generate.py --resolution 480p --prompt "the cat jumps" --image_path cat.png       image to video
    torchrun --nproc_per_node=8 generate.py --resolution 480p --valid_video_csv prompts.csv

Each video's settings are saved beside it as JSON. The same command again makes the videos that are
missing. Ignored flags of the public reference: docs/reference_flags.md.
"""

import argparse
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from hyvideo.data.cli import Parser
from hyvideo.data.run_folder import Lease
from hyvideo.data.text import quote, shorten
from hyvideo.settings import processes
from hyvideo.settings.command_line import add_section, flag_options, read_settings
from hyvideo.settings.config import LEAVES, Config, read_sections
from hyvideo.settings.reference_flags import (
    add_flags,
    meanings,
    print_ignored,
    table,
    take_flags,
    with_flags,
)
from hyvideo.settings.sections import Section, leaves_of, start

# Flags of the public reference's program, and the settings of a run that they set.
RENAMED = {
    "num_inference_steps": "validation_steps",
    "stochastic": "sde_type",
    "guidance_scale": "cfg_scale",
    "video_length": "sample_n_frames",
}
SETTINGS = (  # of a run, whose flags this program has as well
    "pretrained_model_root transformer_version family vae_dtype vae_tile_size shift sigmas fps "
    "guidance_interval negative_prompt eta dtype device num_threads"
).split()
SENTENCES = {  # help of the flags whose setting has another purpose in a training run
    "num_inference_steps": "Denoising steps; default: the value of the run's validation, or of the version.",
    "stochastic": "Sample with the noise of this sampler (docs/samplers.md); default: as in validation, the ODE "
    "except for models that sample with noise.",
    "video_length": "Frames; default: the value of the run's validation, or of the version.",
    "negative_prompt": "Negative prompt for guidance; default: the value of the run or the version.",
    "eta": "Noise scale of --stochastic.",
    "shift": "Shift of the noise levels; default: the value of the run or the version.",
}
REWARD_SETTINGS = ("reward_model", "reward_weights", "reward_config")
SPEED = {
    "use_sageattn": ("attention_kernel", "sage"),
    "enable_torch_compile": ("enable_compile", "true"),
}
MAX_SIDE = 8_192  # pixels
CACHING = (
    "cache_type total_steps cache_start_step cache_end_step cache_step_interval no_cache_block_id"
).split()


class PromptFlags(Section):
    """Prompts and output."""

    prompt: list[str] = start([], "One or more prompts.")
    image_path: str | None = start(None, "First frame for the videos of --prompt (image-to-video).")
    valid_video_csv: list[str] = start(
        [], "CSV files: `prompt`, optionally `ref_image_path` and `seed`."
    )
    num_videos: int = start(1, "Videos per prompt.", ge=1, le=100_000)
    seed: int = start(0, "Random seed.", ge=-(2**63), le=2**64 - 1)
    output_path: Path = start(Path("outputs/videos"), "Folder or mp4 file to write.")
    keep_latents: bool = start(
        False,
        "Also write the latents of NAME.mp4 to NAME.safetensors, so that objective dpo need not "
        "encode the video.",
    )


class ModelFlags(Section):
    """Model."""

    config: str | None = start(
        None,
        "YAML of a run; default: the file of --checkpoint_path, or configs/miniature.yaml if no "
        "model is given.",
    )
    resolution: Literal["480p", "720p"] | None = start(
        None, "Select the version by resolution and task."
    )
    cfg_distilled: bool | None = start(
        None, "Select the guidance-distilled version; with --resolution."
    )
    enable_step_distill: bool | None = start(
        None, "Select the step-distilled version; with --resolution."
    )
    checkpoint_path: Path | None = start(
        None, "Checkpoint of a training run; default: the base model."
    )
    lora_path: Path | None = start(None, "File or folder of a LoRA.")
    lora_scale: float = start(1.0, "Factor of the LoRA's weights.")


class SamplingFlags(Section):
    """Sampling.

    The version sets the defaults. With --config or a checkpoint of a run, its validation sets
    frames, size, shift and steps. With --stochastic, its rollouts set frames, size and shift.
    """

    aspect_ratio: str | None = start(
        None, "Width:height, such as 16:9; default: the ratio of the image."
    )
    height: int | None = start(None, "Height in pixels; with --width.", ge=1, le=MAX_SIDE)
    width: int | None = start(None, "Width in pixels; with --height.", ge=1, le=MAX_SIDE)
    initial_noise: Literal["default", "reference"] = start(
        "default", "reference: the noise that HunyuanVideo-1.5 draws for the seed."
    )
    sp_size: int = start(1, "Processes of torchrun that share one video.", ge=1, le=1024)
    sr: bool = start(False, "Super-resolution of the videos: 480p to 720p, or 720p to 1080p.")
    save_pre_sr_video: bool = start(False, "With --sr, also write NAME_before_sr.mp4.")


class MemoryFlags(Section):
    """Memory.

    By default, a GPU with less than 60 GiB offloads models in groups, and a larger one keeps them.
    On a CPU, where it was tested, offloading does not change the videos.
    """

    offloading: bool | None = start(None, "Keep models on the CPU except while they compute.")
    group_offloading: bool | None = start(
        None,
        "Copy the blocks of transformer and text encoder to the GPU in groups; needs --offloading.",
    )
    overlap_group_offloading: bool | None = start(
        None,
        "Copy a block while the previous one computes (default); false: groups of four blocks, "
        "without overlap.",
    )
    print_memory: str | None = start(
        None,
        "Print the memory that each way of offloading needs, for a GPU such as RTX 4090, and exit.",
    )


class RewritingFlags(Section):
    """Prompt rewriting."""

    rewrite: bool = start(False, "Rewrite the prompts by a language model; the JSON has both.")
    rewrite_url: str = start("", "OpenAI-compatible endpoint, such as http://localhost:8000/v1.")
    rewrite_model: str = start("", "Model of the endpoint.")
    rewrite_key_env: str = start(
        "OPENAI_API_KEY", 'Environment variable of the API key; "" sends none.'
    )
    rewrite_prompt_file: str | None = start(
        None, "Text file with the instruction for the model; default: our own."
    )
    rewrite_fallback: bool = start(
        False, "Use a prompt as it is if it cannot be rewritten; otherwise that is an error."
    )
    rewritten_csv: Path | None = start(
        None,
        "Write the prompts to this CSV and exit, for training; the same command resumes.",
    )


class SpeedFlags(Section):
    """Speed.

    These flags change the videos; torch.compile, only by rounding.
    """

    use_sageattn: bool = start(
        False, "Attention of the blocks by the package sageattention (8 bits)."
    )
    enable_torch_compile: bool = start(False, "Compile the transformer's blocks at the first step.")
    enable_cache: bool = start(
        False,
        "Run most blocks only at some steps; the defaults are for 50 steps, counted from 0.",
    )
    cache_type: Literal["deepcache", "teacache", "taylorcache"] | None = start(
        None, "Kind of step caching (default: deepcache)."
    )
    total_steps: int | None = start(None, "Number of steps of the schedule (default: 50).")
    cache_start_step: int | None = start(None, "All blocks run before this step (default: 11).")
    cache_end_step: int | None = start(None, "All blocks run from this step (default: 45).")
    cache_step_interval: int | None = start(
        None, "Between start and end, all blocks run every N steps (default: 4)."
    )
    no_cache_block_id: list[int] | None = start(
        None, "Blocks that deepcache runs at every step (default: the last)."
    )


class CandidateFlags(Section):
    """Best of n.

    Sample several candidates of each video and keep the best by --reward_model.
    """

    best_of: int = start(1, "Candidates per video.", ge=1, le=1_000)


FLAGS = (
    PromptFlags,
    ModelFlags,
    SamplingFlags,
    MemoryFlags,
    RewritingFlags,
    SpeedFlags,
    CandidateFlags,
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the values of the flags; those of settings are text, and None if not given."""
    parser = Parser(__doc__, usage="%(prog)s --prompt TEXT [--flag value ...]")
    for cls in FLAGS:
        add_section(parser, cls.__doc__, leaves_of(cls), default=argparse.SUPPRESS)
    settings = parser.add_argument_group("Settings of the model and its sampling")
    flags = RENAMED | {name: name for name in (*SETTINGS, *REWARD_SETTINGS)}
    for flag, name in flags.items():
        options = flag_options(LEAVES[name], sentence=SENTENCES.get(flag, ""))
        settings.add_argument(f"--{flag}", **options)
        if name != flag:  # the name in training
            options |= {"dest": flag, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            settings.add_argument(f"--{name}", **options)
    renamed = add_flags(parser, sys.argv[1:] if argv is None else argv, table("generate"))
    options = parser.parse_args(argv)
    values = vars(options)
    of_reference = take_flags(values, renamed)
    given = {setting: flag for flag, setting in flags.items() if values[flag] is not None}
    sections, problems, _ = read_sections({cls.__name__: cls for cls in FLAGS}, values)
    if problems:
        parser.error("\n".join(problems))
    for section in sections.values():
        values |= dict(section)
    options.reference_flags, options.flags = of_reference, given
    return options


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that are out of range or contradict one another."""
    if not options.prompt and not options.valid_video_csv:
        raise ValueError("no prompts: give --prompt or --valid_video_csv")
    if options.image_path == "":
        raise ValueError("--image_path must be an image file, got an empty path; remove the flag")
    if options.image_path and not options.prompt:
        raise ValueError(
            "--image_path needs --prompt; for a CSV, set images in its column ref_image_path"
        )
    if (options.height is None) != (options.width is None):
        raise ValueError(
            f"--height and --width must be given together, got {options.height} and {options.width}"
        )
    if options.keep_latents and options.sr:
        raise ValueError(
            "--keep_latents cannot be used with --sr, whose videos have other latents; remove one "
            "of them"
        )
    if options.eta is not None and not options.stochastic:
        raise ValueError("--eta needs --stochastic: the ODE adds no noise")
    check_best_of(options)
    check_rewriting(options)
    Config.from_flat({setting: getattr(options, flag) for setting, flag in options.flags.items()})


def check_best_of(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict --best_of, or need it."""
    given = [name for name in REWARD_SETTINGS if getattr(options, name) is not None]
    if given and options.best_of == 1:
        raise ValueError(
            f"--{given[0]} needs --best_of above 1, because only candidates are scored, got 1"
        )
    if options.best_of > 1 and options.sp_size > 1:
        raise ValueError(
            "--best_of needs --sp_size 1, because each process scores its own videos, got sp_size "
            f"{options.sp_size}; remove one of them"
        )
    if options.best_of > 1 and options.initial_noise == "reference":
        raise ValueError(
            "--best_of needs --initial_noise default, because the reference has one noise for each "
            "seed"
        )


def check_rewriting(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict --rewrite, or need it."""
    for name, leaf in leaves_of(RewritingFlags).items():
        if getattr(options, name) != leaf.default and not options.rewrite:
            raise ValueError(f"--{name} needs --rewrite true")
    csvs = [os.path.realpath(csv) for csv in options.valid_video_csv]
    if options.rewritten_csv and os.path.realpath(options.rewritten_csv) in csvs:
        raise ValueError(
            "--rewritten_csv must be another file than --valid_video_csv, whose other columns it "
            f"would lose, got {quote(options.rewritten_csv)}"
        )
    if options.rewrite and processes.world_size() > 1:
        raise ValueError(
            "--rewrite must run in one process: rewrite the prompts with python generate.py "
            "--rewrite true --rewritten_csv prompts.csv first, and use torchrun with "
            "--valid_video_csv prompts.csv"
        )


def convert_reference_flags(options: argparse.Namespace) -> None:
    """Convert the public reference's forms: ``--image_path none``, and flags with another name
    here.

    As in the public reference, ``--valid_video_csv`` replaces ``--prompt`` and its image.
    """
    if options.image_path and options.image_path.lower() == "none":
        options.image_path = None
    if options.prompt and options.valid_video_csv:
        unused = ["prompt", "image_path"] if options.image_path else ["prompt"]
        print_ignored({"--valid_video_csv names the prompts": unused})
        options.prompt, options.image_path = [], None
    if options.save_pre_sr_video and not options.sr:
        print_ignored({"without --sr there is no super-resolution": ["save_pre_sr_video true"]})
    found, ignored = meanings(options.reference_flags, table("generate"), {})
    print_ignored(ignored)
    for side, flag, pixels, _ in found:
        if getattr(options, side) not in (None, pixels):
            raise ValueError(
                f"--{flag} contradicts --{side} {getattr(options, side)}; give only one of them"
            )
        setattr(options, side, pixels)
    if options.aspect_ratio and options.height is not None:
        print_ignored(
            {"--height and --width set the size": [f"aspect_ratio {options.aspect_ratio}"]}
        )


def sampling_of(options: argparse.Namespace, has_images: bool):
    """Return the settings of a YAML file, of a checkpoint's run or of a version, overridden by the
    flags, and how videos are sampled with them.
    """
    from hyvideo.generation.generation import resolve_sampling
    from hyvideo.training.saved_policy import settings_of_run

    file_settings = {} if options.config is None else read_settings(options.config)
    if options.checkpoint_path and options.config is None:
        file_settings, options.config = settings_of_run(options.checkpoint_path)
        if options.config and processes.rank() == 0:
            print(f"using the settings of the checkpoint's run: {options.config}", file=sys.stderr)
    given = {setting: getattr(options, flag) for setting, flag in options.flags.items()}
    given["enable_compile"] = "false"
    if options.eta is not None:
        given["match_noise"] = ""
    for flag, (setting, value) in SPEED.items():
        if getattr(options, flag):
            given[setting], options.flags[setting] = value, flag
    kinds = {"cfg_distilled": options.cfg_distilled, "step_distilled": options.enable_step_distill}
    return resolve_sampling(file_settings, given, options.resolution, has_images, kinds)


def size_of(options: argparse.Namespace, settings, image: str | None) -> tuple[int, int]:
    """Return height and width in pixels: from the flags, from the version and aspect ratio, or from
    the run.
    """
    from hyvideo.data.images import bucket_sizes, nearest_size, read_image, size_of_aspect_ratio
    from hyvideo.models.versions import version_defaults

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


def caching_of(options: argparse.Namespace):
    """Return the step caching of the flags, or None; flags without ``--enable_cache`` are named."""
    from hyvideo.models.step_cache import StepCaching

    given = {name: getattr(options, name) for name in CACHING}
    given = {name: value for name, value in given.items() if value is not None}
    if options.enable_cache:
        return StepCaching(**given)
    if given:
        print_ignored(
            {"enable_cache is not set": [f"{name} {value}" for name, value in given.items()]}
        )
    return None


def rewriter_of(options: argparse.Namespace):
    """Return the rewriter of the flags ``--rewrite_*``."""
    from hyvideo.rewards.prompt_rewriting import INSTRUCTION, Rewriter

    return Rewriter(
        url=options.rewrite_url,
        model=options.rewrite_model,
        key_env=options.rewrite_key_env,
        prompt_file=options.rewrite_prompt_file or INSTRUCTION,
        fallback=options.rewrite_fallback,
    )


def check_noise(options: argparse.Namespace, requests: list, root: str, version: str) -> None:
    """Raise ValueError for an initial noise that makes videos identical or that a family lacks."""
    from hyvideo.models.sizes import family_of_version
    from hyvideo.models.versions import FAMILIES

    is_reference = options.initial_noise == "reference"
    has_fixed_noise = is_reference or any(request.seed is not None for request in requests)
    if options.num_videos > 1 and has_fixed_noise:
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


def run(options: argparse.Namespace) -> list[str]:
    """Generate the videos; return the problems of those that best of n could not choose."""
    convert_reference_flags(options)
    if options.print_memory:
        print_memory(options)
        return []
    check(options)

    from hyvideo.distributed import mesh as ranks
    from hyvideo.generation import generation
    from hyvideo.generation.generator import Generator
    from hyvideo.settings.rules import check_evaluation, check_sampling

    requests = generation.make_and_read_requests(
        options.prompt, options.image_path, options.valid_video_csv
    )
    settings = generation_settings(options, has_images=any(request.image for request in requests))
    config = settings.config
    rewriter = rewriter_of(options) if options.rewrite else None
    model = config.model
    check_noise(options, requests, model.pretrained_model_root, model.transformer_version)
    output = options.output_path
    folder = output.parent if output.suffix == ".mp4" else output
    root = model.pretrained_model_root
    check_sampling(settings.sampling, root=root, output=folder)
    if options.best_of > 1:
        check_evaluation(config.reward, root=root, output=folder)
    if options.rewritten_csv:
        rewriter.write(requests, options.rewritten_csv)
        return []
    sizes = {request: size_of(options, settings, request.image) for request in requests}
    videos = generation.list_videos(
        sizes, [r for r in requests for _ in range(options.num_videos)], output
    )
    generator = Generator(settings, videos)
    if rewriter:  # after all checks, because it calls a service
        requests = rewriter.write(requests)
        videos = [
            replace(video, request=requests[video.number // options.num_videos]) for video in videos
        ]
        generator = Generator(settings, videos)
    # calls with one named mp4 file may share a folder
    owns_folder = output == folder and processes.rank() == 0
    if owns_folder:
        print_other_videos(folder, videos)
    with Lease(folder) if owns_folder else nullcontext():
        problems = generator.make()
    ranks.stop()
    write_page(options, folder, videos)
    return problems


def print_memory(options: argparse.Namespace) -> None:
    """Print the memory of each way of offloading for a video of this size."""
    from hyvideo.planning.generation import memory_lines

    settings = generation_settings(options, has_images=bool(options.image_path))
    height, width = size_of(options, settings, options.image_path)
    config = settings.config.with_settings(
        height=height, width=width, sample_n_frames=settings.sampling.frames
    )
    print("\n".join(memory_lines(config, options.print_memory)))


def generation_settings(options: argparse.Namespace, has_images: bool):
    """Return how the videos are made."""
    from hyvideo.generation.generation import Source
    from hyvideo.generation.generator import GenerationSettings
    from hyvideo.settings.offloading import Offloading

    caching = caching_of(options)
    offloading = Offloading(
        options.offloading, options.group_offloading, options.overlap_group_offloading
    )
    source = Source(options.checkpoint_path, options.lora_path, options.lora_scale)
    config, sampling = sampling_of(options, has_images)
    return GenerationSettings(
        config,
        sampling,
        source,
        seed=options.seed,
        offloading=offloading,
        initial_noise=options.initial_noise,
        sp_size=options.sp_size,
        caching=caching,
        sr=options.sr,
        save_pre_sr_video=options.save_pre_sr_video,
        keep_latents=options.keep_latents,
        best_of=options.best_of,
    )


def write_page(options: argparse.Namespace, folder: Path, videos: list) -> None:
    """Write the page of several videos, from the first process of each replica that has one."""
    from hyvideo.report.gallery import PAGE_FILE, write_gallery

    replica, place = divmod(processes.rank(), options.sp_size)
    has_video = place == 0 and replica < len(videos)
    if has_video and (len(videos) > 1 or (options.output_path / PAGE_FILE).is_file()):
        write_gallery(folder)


def print_other_videos(folder: Path, videos: list) -> None:
    """Print that the folder has mp4 files that this call does not replace."""
    others = {path.name for path in folder.glob("*.mp4")}
    for video in videos:
        others -= {video.path.name, f"{video.path.stem}_before_sr.mp4"}
    if others:
        print(
            f"{quote(folder)} also has {len(others)} other mp4 files, such as {min(others)}: they "
            "are kept, and index.html and scripts.evaluate --videos include them",
            file=sys.stderr,
        )


def exit_on_signal(number: int, _frame) -> None:
    """Exit by an exception, so that temporary files are deleted."""
    sys.exit(128 + number)


def main() -> int:
    processes.use_expandable_segments()
    options = parse()
    try:
        processes.share_compile_workers()
        problems = run(options)
    # the last is a full disk
    except (ValueError, OSError, FloatingPointError, SafetensorError) as error:
        print(f"generate.py: {shorten(with_flags(str(error), options.flags))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if problems:
        print(
            f"generate.py: no candidate of {len(problems)} videos has a reward, so the first one "
            "is kept; repeat the command to make these videos again",
            *problems,
            sep="\n",
            file=sys.stderr,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, exit_on_signal)
    sys.exit(processes.end_soon(main()))  # also if a scorer hangs
