"""Flags of generate.py: their sections, and the rules between them."""

import argparse
from pathlib import Path
from typing import Literal

from hyvideo.files.cli import TRUTHS, Parser
from hyvideo.settings import processes
from hyvideo.settings.command_line import add_section, flag_options
from hyvideo.settings.config import LEAVES, Config, read_sections
from hyvideo.settings.reference_flags import IGNORED_BY_GENERATE, print_ignored, size_of
from hyvideo.settings.sections import Section, leaves_of, start

# Flags of the public reference's program, and the settings of a run that they set.
RENAMED = {
    "num_inference_steps": "validation_steps",
    "stochastic": "sde_type",
    "guidance_scale": "cfg_scale",
    "low_noise_guidance_scale": "low_noise_cfg_scale",
    "video_length": "sample_n_frames",
}
SETTINGS = (  # of a run, whose flags this program has as well
    "pretrained_model_root transformer_version family expert base_lora_path low_noise_base_lora_path "
    "ignore_lora_expert vae_dtype vae_tile_size shift sigmas fps "
    "guidance_interval negative_prompt eta dtype base_weight_dtype partner_weight_dtype device "
    "num_threads"
).split()
ALSO = {"pretrained_model_root": ["--model_path"]}  # further names, as in HunyuanVideo-1.5
SENTENCES = {  # help of the flags whose setting has another purpose in a training run
    "num_inference_steps": "Denoising steps; default: the value of the run's validation, or of the version.",
    "stochastic": "Sample with the noise of this sampler (docs/methods.md#samplers); default: as in validation, "
    "the ODE except for models that sample with noise.",
    "video_length": "Frames; default: the value of the run's validation, or of the version.",
    "negative_prompt": "Negative prompt for guidance; default: the value of the run or the version.",
    "eta": "Noise scale of --stochastic.",
    "expert": "Which transformer of a model of two experts --checkpoint_path or --lora_path is for.",
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
    last_image_path: str | None = start(
        None, "Last frame for the videos of --prompt, beside --image_path (first and last frame)."
    )
    valid_video_csv: list[str] = start(
        [],
        "Files or folders of prompts: one in each line, or tables with `prompt`, optionally "
        "`ref_image_path`, `ref_last_image_path` and `seed`.",
    )
    num_videos: int = start(1, "Videos per prompt.", ge=1, le=100_000)
    seed: int = start(0, "Random seed.", ge=-(2**63), le=2**64 - 1)
    output_path: Path = start(Path("outputs/videos"), "Folder or mp4 file to write.")
    keep_latents: bool = start(
        False,
        "Also write the latents of NAME.mp4 to NAME.safetensors, so that objectives dpo and sft "
        "need not encode the video.",
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
    initial_noise: Literal["default", "reference", "validation"] = start(
        "default",
        "reference: the noise that HunyuanVideo-1.5 draws for the seed; validation: that of a run's "
        "validation videos, for the same CSV, --seed and --num_videos as its validation.",
    )
    sp_size: int = start(1, "Processes of torchrun that share one video.", ge=1, le=1024)
    sr: bool = start(False, "Super-resolution of the videos: 480p to 720p, or 720p to 1080p.")
    save_pre_sr_video: bool = start(False, "With --sr, also write NAME_before_sr.mp4.")


class MemoryFlags(Section):
    """Memory.

    By default, a GPU with less than 60 GiB offloads models in groups. A larger one keeps all models
    or, if they do not fit together, the one in use. On a CPU, where it was tested, offloading does not
    change the videos.
    """

    offloading: Literal["auto", "none", "model", "group", "true", "false"] = start(
        "auto",
        "Where models are while they do not compute. none: on the GPU; model: on the CPU; group: "
        "blocks are copied to the GPU one after another. true is model, and false is none.",
    )
    group_offloading: bool | None = start(None, "Flag of the original: true is --offloading group.")
    overlap_group_offloading: bool | None = start(
        None, "Flag of the original, without effect: the next block is always copied meanwhile."
    )
    print_memory: str | None = start(
        None,
        "Print the memory that each way of offloading needs, for a GPU such as RTX 4090, and exit.",
    )


class RewritingFlags(Section):
    """Prompt rewriting."""

    rewrite: str = start(
        "false",
        "Rewrite the prompts by a language model: its options, as a YAML file or JSON with url and "
        "model (docs/generate.md#memory-and-speed).",
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


def parse(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the values of the flags; those of settings are text, and None if not given.

    ``description`` is the text of ``--help`` above the flags.
    """
    parser = Parser(description, usage="%(prog)s --prompt TEXT [--flag value ...]")
    for cls in FLAGS:
        add_section(parser, cls.__doc__, leaves_of(cls), default=argparse.SUPPRESS)
    settings = parser.add_argument_group("Settings of the model and its sampling")
    flags = RENAMED | {name: name for name in (*SETTINGS, *REWARD_SETTINGS)}
    for flag, name in flags.items():
        options = flag_options(LEAVES[name], sentence=SENTENCES.get(flag, ""))
        settings.add_argument(f"--{flag}", *ALSO.get(flag, []), **options)
        if name != flag:  # the name in training
            options |= {"dest": flag, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            settings.add_argument(f"--{name}", **options)
    parser.add_argument("--fixed_size", default="none", help=argparse.SUPPRESS)
    for name in IGNORED_BY_GENERATE:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    values = vars(options)
    given = {setting: flag for flag, setting in flags.items() if values[flag] is not None}
    sections, problems = read_sections({cls.__name__: cls for cls in FLAGS}, values)
    if problems:
        parser.error("\n".join(problems))
    for section in sections.values():
        values |= dict(section)
    options.flags = given
    return options


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that are out of range or contradict one another."""
    if not options.prompt and not options.valid_video_csv:
        raise ValueError("no prompts: give --prompt or --valid_video_csv")
    if options.image_path and not options.prompt:
        raise ValueError(
            "--image_path needs --prompt; for a CSV, set images in its column ref_image_path"
        )
    if options.last_image_path and not options.image_path:
        raise ValueError(
            "--last_image_path needs --image_path, the first frame; for a CSV, set images in its "
            "columns ref_image_path and ref_last_image_path"
        )
    if (options.height is None) != (options.width is None):
        raise ValueError(
            f"--height and --width must be given together, got {options.height} and {options.width}"
        )
    if options.eta is not None and not options.stochastic:
        raise ValueError("--eta needs --stochastic: the ODE adds no noise")
    check_best_of(options)
    if options.rewrite != "false" and processes.world_size() > 1:
        raise ValueError(
            "--rewrite must run in one process: rewrite the prompts with python generate.py and the "
            "option csv first, and use torchrun with --valid_video_csv"
        )
    Config.from_flat({setting: getattr(options, flag) for setting, flag in options.flags.items()})


def check_best_of(options: argparse.Namespace) -> None:
    """Raise ValueError for flags that contradict --best_of."""
    if options.best_of > 1 and options.sp_size > 1:
        raise ValueError(
            "--best_of needs --sp_size 1, because each process scores its own videos, got sp_size "
            f"{options.sp_size}; remove one of them"
        )
    if options.best_of > 1 and options.initial_noise != "default":
        raise ValueError(
            "--best_of needs --initial_noise default, because the candidates of a seed have "
            f"different noise, got {options.initial_noise}"
        )


def convert_reference_flags(options: argparse.Namespace) -> None:
    """Convert the public reference's forms: ``--image_path none``, and flags with another name
    here.

    As in the public reference, ``--valid_video_csv`` replaces ``--prompt`` and its images.
    """
    if options.image_path and options.image_path.lower() == "none":
        options.image_path = None
    if options.prompt and options.valid_video_csv:
        images = [name for name in ("image_path", "last_image_path") if getattr(options, name)]
        print_ignored(["prompt", *images], "--valid_video_csv names the prompts")
        options.prompt = []
        options.image_path = options.last_image_path = None
    if options.rewrite.lower() in TRUTHS:
        options.rewrite = str(TRUTHS[options.rewrite.lower()]).lower()
    words = {"true": "model", "false": "none"}
    options.offloading = words.get(options.offloading, options.offloading)
    if options.group_offloading:
        options.offloading = "group"
    if options.save_pre_sr_video and not options.sr:
        print_ignored(["save_pre_sr_video"], "without --sr there is no super-resolution")
    ignored = [name for name in IGNORED_BY_GENERATE if getattr(options, name) is not None]
    if ignored:
        print_ignored(ignored, "this program decides or lacks what they do in the reference")
    if options.fixed_size != "none":
        size = size_of("--fixed_size", options.fixed_size)
        if options.height is not None and (options.height, options.width) != size:
            raise ValueError(
                f"--fixed_size {options.fixed_size} contradicts --height {options.height} and "
                f"--width {options.width}; give only one of them"
            )
        options.height, options.width = size
    if options.aspect_ratio and options.height is not None:
        print_ignored(["aspect_ratio"], "--height and --width set the size")
