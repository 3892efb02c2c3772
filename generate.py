"""Makes videos: ``generate.py --config configs/miniature.yaml --prompt "a red circle moves up"``.

From the base model, from a checkpoint of a training run (``--checkpoint_path outputs/.../checkpoints/000060``) or with
a LoRA (``--lora_path``). With HunyuanVideo-1.5 in ./ckpts:

    generate.py --resolution 480p --prompt "a cat jumps"                              text to video
    generate.py --resolution 480p --prompt "the cat jumps" --image_path cat.png       image to video
    torchrun --nproc_per_node=8 generate.py --resolution 480p --valid_video_csv prompts.csv

Every mp4 has a JSON file of its settings beside it.
"""

import argparse
import math
import sys
from pathlib import Path

from hyvideo.config.command_line import load_config
from hyvideo.config.settings import Config
from hyvideo.data.outside import BriefErrors, brief, shown
from hyvideo.models.versions import version_defaults

MINIATURE = "configs/miniature.yaml"
VIDEO_LENGTH = 121  # frames that HunyuanVideo-1.5 makes by default: 5 seconds
MOST_VIDEOS = 100_000  # of one call
MOST_PIXELS = 8_192  # of a side


class Parser(BriefErrors, argparse.ArgumentParser):
    pass


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to make")
    what.add_argument("--prompt", nargs="+", help="one or more prompts")
    what.add_argument("--image_path", help="first frame of the videos, for image-to-video")
    what.add_argument("--valid_video_csv", help="CSV with a column `prompt`, perhaps `ref_image_path`, for --prompt")
    what.add_argument("--num_videos", type=int, default=1, help="videos of each prompt")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--output_path", type=Path, default=Path("outputs/videos"), help="folder, or one mp4")
    model = parser.add_argument_group("by which model")
    model.add_argument("--config", help=f"YAML of a run; {MINIATURE} unless a model is named by the next three")
    model.add_argument("--model_path", help="folder of the checkpoints; ./ckpts by default")
    model.add_argument("--resolution", choices=["480p", "720p"], help="picks the version with the task")
    model.add_argument("--transformer_version", help="a version by name, such as 480p_i2v_step_distilled")
    model.add_argument("--checkpoint_path", type=Path, help="checkpoint of a training run; the base model by default")
    model.add_argument("--lora_path", type=Path, help="file or folder of a LoRA")
    model.add_argument("--lora_scale", type=float, default=1.0)
    model.add_argument("--dtype", choices=["bf16", "fp32"], help="precision of the transformer")
    model.add_argument("--device", choices=["auto", "cuda", "cpu"])
    how = parser.add_argument_group("how; the version's or the config's by default")
    how.add_argument("--num_inference_steps", type=int, help="denoising steps")
    how.add_argument("--guidance_scale", type=float, help="1 or less runs one branch")
    how.add_argument("--shift", type=float, help="shift of the noise schedule")
    how.add_argument("--video_length", type=int, help="frames, 4n + 1")
    how.add_argument("--aspect_ratio", help="width:height, such as 16:9; the shape of the image by default")
    how.add_argument("--height", type=int, help="pixels, with --width")
    how.add_argument("--width", type=int, help="pixels, with --height")
    how.add_argument("--stochastic", metavar="SDE_TYPE", help="sample as rollouts are: sage_grpo, flow_grpo, ...")
    how.add_argument("--eta", type=float, help="exploration scale, with --stochastic")
    return parser.parse_args()


def config_of(options: argparse.Namespace, has_images: bool) -> Config:
    """The settings: those of a YAML file or of a version, changed by the flags."""
    names_model = options.model_path or options.resolution or options.transformer_version
    version = options.transformer_version
    if version is None and options.resolution:
        version = f"{options.resolution}_{'i2v' if has_images else 't2v'}"
    flags = {
        "pretrained_model_root": options.model_path,
        "transformer_version": version,
        "validation_steps": options.num_inference_steps,
        "cfg_scale": options.guidance_scale,
        "shift": options.shift,
        "sample_n_frames": options.video_length,
        "sde_type": options.stochastic,
        "eta": options.eta,
        "match_noise": None if options.eta is None else "",
        "dtype": options.dtype,
        "device": options.device,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if options.config or not names_model:
        return load_config(options.config or MINIATURE, **given)
    config = Config().with_settings(sample_n_frames=VIDEO_LENGTH).with_settings(**given)
    defaults = version_defaults(config.model.transformer_version)
    if options.num_inference_steps is None and defaults:
        config = config.with_settings(validation_steps=defaults.num_steps)
    return config.resolved()


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for flags that cannot go together."""
    if (options.prompt is None) == (options.valid_video_csv is None):
        raise ValueError("give the prompts by --prompt or by --valid_video_csv, one of the two")
    if options.image_path and options.valid_video_csv:
        raise ValueError("--image_path goes with --prompt; a CSV names its images in a column ref_image_path")
    limits = {
        "num_videos": (1, MOST_VIDEOS),
        "height": (1, MOST_PIXELS),
        "width": (1, MOST_PIXELS),
        "seed": (-(2**63), 2**64 - 1),
    }
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name} must be a number from {least:,} to {most:,}, got {shown(value, 40)[1:-1]}")
    if not math.isfinite(options.lora_scale):
        raise ValueError(f"--lora_scale must be a finite number, got {options.lora_scale}")
    if (options.height is None) != (options.width is None):
        raise ValueError(f"--height and --width go together, got {options.height} and {options.width}")
    if options.eta is not None and not options.stochastic:
        raise ValueError("--eta needs --stochastic: without it no noise is added")
    if options.lora_scale != 1.0 and not options.lora_path:
        raise ValueError("--lora_scale needs --lora_path")


def requests_of(options: argparse.Namespace) -> list:
    from hyvideo.data.images import check_image
    from hyvideo.data.prompts import Request, check_prompt, read_requests

    if options.valid_video_csv:
        requests = read_requests(options.valid_video_csv)
    else:
        for number, prompt in enumerate(options.prompt, start=1):
            check_prompt(prompt, f"as number {number} of --prompt")
        requests = [Request(prompt, options.image_path) for prompt in options.prompt]
    for image in dict.fromkeys(request.image for request in requests if request.image):
        check_image(image)
    return requests


def size_of(options: argparse.Namespace, config: Config, image: str | None) -> tuple[int, int]:
    """Height and width: as asked for, or the bucket of the version's resolution nearest to the image's shape."""
    from hyvideo.data.images import nearest_size, read_image, size_of_aspect_ratio

    if options.height is not None:
        return options.height, options.width
    version = version_defaults(config.model.transformer_version)
    resolution = options.resolution or (version.resolution if version else None)
    if options.aspect_ratio:
        if resolution is None:
            raise ValueError("--aspect_ratio needs --resolution: this model has no resolution of its own")
        return size_of_aspect_ratio(options.aspect_ratio, resolution)
    if options.config or resolution is None:
        return config.data.height, config.data.width
    if image:
        picture = read_image(image)
        return nearest_size(picture.height, picture.width, resolution)
    return size_of_aspect_ratio("16:9", resolution)


def run(options: argparse.Namespace) -> None:
    check(options)
    requests = requests_of(options)
    config = config_of(options, has_images=any(request.image for request in requests))
    is_file = options.output_path.suffix == ".mp4"

    from hyvideo.config.rules import check_sampling
    from hyvideo.data.outside import unusable
    from hyvideo.evaluation.generation import Source, Video, generate

    check_sampling(config, output=options.output_path.parent if is_file else options.output_path)
    if len(requests) * options.num_videos > MOST_VIDEOS:
        raise ValueError(
            f"one call makes at most {MOST_VIDEOS:,} videos, got {len(requests):,} prompts with --num_videos "
            f"{options.num_videos:,}"
        )
    sizes = {request: size_of(options, config, request.image) for request in requests}
    wanted = [request for request in requests for _ in range(options.num_videos)]
    if is_file and len(wanted) > 1:
        raise ValueError(f"--output_path must be a folder for {len(wanted)} videos, got {options.output_path}")
    videos = [
        Video(request, *sizes[request], number, options.output_path if is_file else options.output_path / name)
        for number, request in enumerate(wanted)
        for name in [f"{number:04d}.mp4"]
    ]
    for name, path in (("checkpoint_path", options.checkpoint_path), ("lora_path", options.lora_path)):
        if path and (problem := unusable(path)):
            raise ValueError(f"--{name} must be a path that can be read, got {shown(path)}: {problem}")
    source = Source(options.checkpoint_path, options.lora_path, options.lora_scale)
    generate(config, videos, source=source, seed=options.seed, is_stochastic=options.stochastic is not None)


def main() -> int:
    options = parse()
    try:
        run(options)
    except ValueError as error:
        print(f"generate.py: {brief(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
