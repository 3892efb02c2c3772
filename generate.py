"""Makes videos: ``generate.py --config configs/miniature.yaml --prompt "a red circle moves up"``.

From the base model, or from a checkpoint of a training run with ``--checkpoint_path outputs/.../checkpoints/000060``.
Every mp4 has a JSON file of its settings beside it.
"""

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from hyvideo.config import load_config
from hyvideo.data import read_prompts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", default="configs/miniature.yaml", help="YAML that names the model and its sizes")
    parser.add_argument("--prompt", nargs="+", help="one or more prompts")
    parser.add_argument("--valid_video_csv", help="CSV with a column `prompt`, in place of --prompt")
    parser.add_argument("--model_path", help="folder of the checkpoints; that of the config by default")
    parser.add_argument("--checkpoint_path", type=Path, help="checkpoint of a training run; the base model by default")
    parser.add_argument("--output_path", type=Path, default=Path("outputs/videos"), help="folder for the videos")
    parser.add_argument("--num_inference_steps", type=int, help="denoising steps; the config's validation by default")
    parser.add_argument("--guidance_scale", type=float, help="1 or less runs one branch; the config's by default")
    parser.add_argument("--shift", type=float, help="shift of the noise schedule; the config's by default")
    parser.add_argument("--video_length", type=int, help="frames, 4n + 1; the config's by default")
    parser.add_argument("--height", type=int, help="pixels; the config's by default")
    parser.add_argument("--width", type=int, help="pixels; the config's by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_videos", type=int, default=1, help="videos of each prompt")
    return parser.parse_args()


def settings_of(options: argparse.Namespace):
    """The config with what the flags change, and the prompts. Raises ValueError for what cannot be used."""
    flags = {
        "pretrained_model_root": options.model_path,
        "validation_steps": options.num_inference_steps,
        "cfg_scale": options.guidance_scale,
        "shift": options.shift,
        "sample_n_frames": options.video_length,
        "height": options.height,
        "width": options.width,
    }
    config = load_config(options.config, **{name: value for name, value in flags.items() if value is not None})
    if (options.prompt is None) == (options.valid_video_csv is None):
        raise ValueError("give the prompts by --prompt or by --valid_video_csv, one of the two")
    for name in ("num_videos", "num_inference_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    prompts = options.prompt or read_prompts(options.valid_video_csv)
    if options.checkpoint_path and not (options.checkpoint_path / "transformer").is_dir():
        raise ValueError(f"--checkpoint_path needs a folder with `transformer` in it, got {options.checkpoint_path}")
    return config, [prompt for prompt in prompts for _ in range(options.num_videos)]


def run(options: argparse.Namespace) -> None:
    config, prompts = settings_of(options)

    import torch

    from hyvideo.components import choose_device, load_components
    from hyvideo.distributed.checkpoint import load_policy
    from hyvideo.distributed.randomness import normal
    from hyvideo.records import peak_memory_gib, write_json
    from hyvideo.video_io import write_video

    device = choose_device(config.model.device)
    components = load_components(config, device)
    if options.checkpoint_path:
        load_policy(components.pipeline.transformer, options.checkpoint_path)
    pipeline = components.pipeline.with_steps(config.record.validation_steps)
    shape = pipeline.latent_shape(config.data.sample_n_frames, config.data.height, config.data.width)
    options.output_path.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for number, prompt in enumerate(tqdm(prompts, unit="video")):
        noise = normal(shape, options.seed, "generate", number)[None].to(device)
        conditions = components.encoder([prompt]).to(device)
        (video,) = pipeline.decode(pipeline.sample_ode(conditions, noise))
        path = options.output_path / f"{number:04d}.mp4"
        write_video(path, video, config.data.fps)
        settings = {
            "prompt": prompt,
            "seed": options.seed,
            "number": number,
            "checkpoint": str(options.checkpoint_path or config.model.pretrained_model_root),
            "steps": config.record.validation_steps,
            "shift": config.rollout.shift,
            "guidance_scale": config.rollout.cfg_scale,
            "frames": config.data.sample_n_frames,
            "height": config.data.height,
            "width": config.data.width,
            "fps": config.data.fps,
        }
        write_json(path.with_suffix(".json"), settings)
    seconds = time.perf_counter() - start
    memory = peak_memory_gib(torch.device(device))
    each = seconds / len(prompts)
    print(f"{len(prompts)} videos in {options.output_path}: {each:.2f} s each, {memory:.2f} GiB at most")


def main() -> int:
    options = parse()
    try:
        run(options)
    except ValueError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
