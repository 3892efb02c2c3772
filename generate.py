"""Makes videos: ``generate.py --config configs/miniature.yaml --prompt "a red circle moves up"``.

From the base model, from a checkpoint of a training run (``--checkpoint_path outputs/.../checkpoints/000060``), by the
settings of that run, or with a LoRA (``--lora_path``). With HunyuanVideo-1.5 in ./ckpts:

    generate.py --resolution 480p --prompt "a cat jumps"                              text to video
    generate.py --resolution 480p --prompt "the cat jumps" --image_path cat.png       image to video
    torchrun --nproc_per_node=8 generate.py --resolution 480p --valid_video_csv prompts.csv

Every mp4 has a JSON file of its settings beside it. Flags of the public reference that do nothing here are understood:
docs/reference_flags.md.
"""

import argparse
import sys
from pathlib import Path

from hyvideo.config import processes
from hyvideo.config.command_line import read_settings, truth
from hyvideo.config.reference_flags import add_flags, meanings, size_of_text, table, with_flags
from hyvideo.data.outside import Parser, brief, shown

# Settings of a run by their flags here.
SETTINGS = {"model_path": "pretrained_model_root", "num_inference_steps": "validation_steps", "stochastic": "sde_type"}
SETTINGS |= {"guidance_scale": "cfg_scale", "video_length": "sample_n_frames"}
SETTINGS |= {name: name for name in ("transformer_version", "shift", "negative_prompt", "eta", "dtype", "device")}
MOST_VIDEOS = 100_000  # of one call
MOST_PIXELS = 8_192  # of a side


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    what = parser.add_argument_group("what to make")
    what.add_argument("--prompt", nargs="+", default=[], help="one or more prompts")
    what.add_argument("--image_path", help="first frame of the videos of --prompt, for image-to-video")
    what.add_argument(
        "--valid_video_csv", nargs="+", default=[], help="CSV files with a column `prompt`, perhaps `ref_image_path`"
    )
    what.add_argument("--negative_prompt", help="prompt that guidance leads away from")
    what.add_argument("--num_videos", type=int, default=1, help="videos of each prompt")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--output_path", type=Path, default=Path("outputs/videos"), help="folder, or one mp4")
    model = parser.add_argument_group("by which model")
    words = "YAML of a run; by default that of --checkpoint_path, else configs/miniature.yaml where no model is named"
    model.add_argument("--config", help=words)
    model.add_argument("--model_path", help="folder of the checkpoints; ./ckpts by default")
    model.add_argument("--resolution", choices=["480p", "720p"], help="picks the version with the task")
    model.add_argument("--transformer_version", help="a version by name, such as 480p_i2v_step_distilled")
    boolean = {"nargs": "?", "const": True, "type": truth, "metavar": "BOOL"}
    model.add_argument("--cfg_distilled", **boolean, help="picks the version for one branch, with --resolution")
    model.add_argument("--enable_step_distill", **boolean, help="picks the version of few steps, with --resolution")
    model.add_argument("--checkpoint_path", type=Path, help="checkpoint of a training run; the base model by default")
    model.add_argument("--lora_path", type=Path, help="file or folder of a LoRA")
    model.add_argument("--lora_scale", type=float, default=1.0)
    model.add_argument("--dtype", choices=["bf16", "fp32"], help="precision of the transformer")
    model.add_argument("--device", choices=["auto", "cuda", "cpu"])
    how = parser.add_argument_group(
        "how",
        "By default as the version is meant to be sampled; with --config or a checkpoint of a run in the frames, size, "
        "shift and steps of its validation, and with --stochastic in the frames, size and shift of its rollouts.",
    )
    how.add_argument("--num_inference_steps", type=int, help="denoising steps")
    how.add_argument("--guidance_scale", type=float, help="1 or less runs one branch")
    how.add_argument("--shift", type=float, help="shift of the noise schedule")
    how.add_argument("--video_length", type=int, help="frames, 4n + 1")
    how.add_argument("--aspect_ratio", help="width:height, such as 16:9; the shape of the image by default")
    how.add_argument("--height", type=int, help="pixels, with --width")
    how.add_argument("--width", type=int, help="pixels, with --height")
    how.add_argument("--fixed_size", help="both as height x width, such as 480x864")
    how.add_argument("--stochastic", metavar="SDE_TYPE", help="sample as rollouts are: sage_grpo, ..., FILE.py:NAME")
    how.add_argument("--eta", type=float, help="exploration scale, with --stochastic")
    renamed = add_flags(parser, sys.argv[1:], table("generate"))
    options = parser.parse_args()
    options.of_reference = {name: getattr(options, name) for name in renamed}
    options.flags = {setting: flag for flag, setting in SETTINGS.items() if getattr(options, flag) is not None}
    return options


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for flags that cannot go together."""
    meanings(options.of_reference, table("generate"), {})
    if not options.prompt and not options.valid_video_csv:
        raise ValueError("give prompts by --prompt, by --valid_video_csv, or by both")
    if options.image_path and not options.prompt:
        raise ValueError("--image_path goes with --prompt; a CSV names its images in a column ref_image_path")
    limits = {"num_videos": (1, MOST_VIDEOS), "seed": (-(2**63), 2**64 - 1)}
    limits |= {"height": (1, MOST_PIXELS), "width": (1, MOST_PIXELS)}
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name} must be a number from {least:,} to {most:,}, got {shown(value, 40)[1:-1]}")
    if (options.height is None) != (options.width is None):
        raise ValueError(f"--height and --width go together, got {options.height} and {options.width}")
    if options.aspect_ratio and options.height is not None and processes.rank() == 0:
        print(f"ignored flags: aspect_ratio {options.aspect_ratio}; the size is given", file=sys.stderr)
    if options.eta is not None and not options.stochastic:
        raise ValueError("--eta needs --stochastic: without it no noise is added")
    if options.cfg_distilled and options.enable_step_distill:
        raise ValueError("--cfg_distilled and --enable_step_distill: no released version is both; give one of them")


def take_reference_forms(options: argparse.Namespace) -> None:
    """Changes options to their forms here: no image for ``none``, and height and width of a fixed size."""
    if options.image_path and options.image_path.lower() == "none":
        options.image_path = None
    if options.fixed_size is None:
        return
    if not (size := size_of_text(options.fixed_size)):
        raise ValueError(f"--fixed_size must be height x width, such as 480x864, got {shown(options.fixed_size)}")
    height, width = map(int, size)
    if (options.height or height, options.width or width) != (height, width):
        raise ValueError(
            f"--fixed_size {options.fixed_size} and --height {options.height} --width {options.width} are names of one "
            "size; give one of them"
        )
    options.height, options.width = height, width


def config_of(options: argparse.Namespace, has_images: bool):
    """Settings of a YAML file, of the run of a checkpoint or of a version, changed by the flags."""
    from hyvideo.evaluation.generation import sampling_config
    from hyvideo.training.saved_policy import settings_of_run

    of_file = read_settings(options.config) if options.config else {}
    if options.checkpoint_path and not options.config:
        of_file, options.config = settings_of_run(options.checkpoint_path)
        if options.config and processes.rank() == 0:
            moved = "" if options.config.suffix == ".yaml" else ", as no config.yaml of its run is two folders above"
            print(f"settings of the checkpoint's run: {options.config}{moved}; flags override them", file=sys.stderr)
    given = {setting: getattr(options, flag) for setting, flag in options.flags.items()}
    given |= {} if options.eta is None else {"match_noise": ""}
    kinds = {"cfg_distilled": options.cfg_distilled, "step_distilled": options.enable_step_distill}
    return sampling_config(of_file, given, options.resolution, has_images, kinds)


def size_of(options: argparse.Namespace, config, image: str | None) -> tuple[int, int]:
    """Height and width in pixels: as asked for, or by the shape that is asked for or of the image."""
    from hyvideo.evaluation.generation import model_size

    if options.height is not None:
        return options.height, options.width
    size = None
    if options.aspect_ratio or options.resolution or not options.config:
        size = model_size(config.model.transformer_version, options.resolution, options.aspect_ratio, image)
    return size or (config.data.height, config.data.width)


def run(options: argparse.Namespace) -> None:
    take_reference_forms(options)
    check(options)

    from hyvideo.config.rules import check_sampling  # what is heavy, only now
    from hyvideo.evaluation import generation

    source = generation.Source(options.checkpoint_path, options.lora_path, options.lora_scale)
    requests = generation.make_and_read_requests(options.prompt, options.image_path, options.valid_video_csv)
    if len(requests) * options.num_videos > MOST_VIDEOS:
        raise ValueError(
            f"one call makes at most {MOST_VIDEOS:,} videos, got {len(requests):,} prompts with --num_videos "
            f"{options.num_videos:,}"
        )
    config = config_of(options, has_images=any(request.image for request in requests))
    output = options.output_path
    folder, is_stochastic = output.parent if output.suffix == ".mp4" else output, options.stochastic is not None
    check_sampling(config, output=folder, is_stochastic=is_stochastic)
    sizes = {request: size_of(options, config, request.image) for request in requests}
    videos = generation.list_videos(sizes, [r for r in requests for _ in range(options.num_videos)], output)
    generation.generate(config, videos, source=source, seed=options.seed, is_stochastic=is_stochastic)


def main() -> int:
    options = parse()
    try:
        run(options)
    except ValueError as error:
        print(f"generate.py: {brief(with_flags(str(error), options.flags))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
