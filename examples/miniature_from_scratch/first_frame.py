"""Train the miniature of Wan2.1 further, so that it also makes videos from a first frame, as
Wan2.2 TI2V-5B does: ``python -m examples.miniature_from_scratch.first_frame``, about eight minutes.

In its videos all objects start in the middle. The first frame thus shows color and shape, and only
the text has the direction. Also writes first frames, and the prompts of the original miniature with
the first frame of their color and shape.
"""

import csv
import json
import shutil
from pathlib import Path

from PIL import Image

from examples.miniature_from_scratch import wan
from examples.miniature_from_scratch.base_policy import (
    build_reference_statistics,
    caption_texts,
    train_policy,
    web_videos,
)
from hyvideo.data.prompts import read_requests
from hyvideo.data.randomness import generator
from hyvideo.data.videos import to_uint8
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder
from hyvideo.miniature import world
from hyvideo.models.family import prepare
from hyvideo.models.loading import load_transformer, load_vae

SOURCE = Path("assets/miniature_wan")
PROMPTS = Path("assets/miniature/prompts")
VERSION = "miniature_wan"
REFERENCE_CLIPS = 8  # per caption, for the reference statistics
STEPS = 600
WEB_CLIPS = 48 * 75  # a multiple of 48
WITH_FIRST_FRAME = 0.8  # fraction of the training videos whose first frame is given


def copy_frozen_parts(out: Path) -> None:
    """Copy the text encoder, tokenizer, scheduler and VAE, and write a model_index.json of a model
    that also makes videos from a first frame.
    """
    for part in ("text_encoder", "tokenizer", "scheduler", "vae"):
        shutil.copytree(SOURCE / part, out / part, dirs_exist_ok=True)
    index = json.loads((SOURCE / "model_index.json").read_text())
    index["expand_timesteps"] = True
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def build_policy(out: Path, seed: int) -> None:
    """Train the transformer on web videos, most of them with their first frame, and write it."""
    vae = load_vae(out)
    transformer = load_transformer(SOURCE, VERSION)
    prepare(transformer, {"text", "image"})
    train_policy(
        transformer,
        web_videos(vae, seed, number=WEB_CLIPS, from_middle=True),
        caption_texts(out, vae),
        num_steps=STEPS,
        seed=seed,
        with_first_frame=WITH_FIRST_FRAME,
    )
    wan.save_transformer(transformer, out, seed)


def write_prompts(out: Path, seed: int) -> None:
    """Write a first frame of each color and shape, and prompts with the frame that they describe."""
    folder = out / "prompts"
    make_folder(folder / "images")
    labels = world.LABELS[world.LABELS[:, 2] == 0]  # the first frame does not show the direction
    videos = to_uint8(world.render(labels, generator(seed, "first frames"), from_middle=True))
    images = {}
    for label, video in zip(labels, videos):  # (3, frames, height, width)
        _, color, shape, *_ = world.caption(label).split()
        images[color, shape] = f"images/{color}_{shape}.png"
        frame = video[:, 0].permute(1, 2, 0).contiguous()
        Image.fromarray(frame.numpy()).save(folder / images[color, shape])
    for name in ("train.csv", "valid.csv"):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["prompt", "ref_image_path"])
            for request in read_requests(PROMPTS / name):
                _, color, shape, *_ = request.prompt.split()
                writer.writerow([request.prompt, images[color, shape]])


@exit_on_error("examples.miniature_from_scratch.first_frame")
def main() -> None:
    parser = Parser(__doc__.splitlines()[0], prog="examples.miniature_from_scratch.first_frame")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("ckpts/miniature_wan_ti2v"), help="folder to write"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all stages")
    options = parser.parse_args()
    out = options.output_dir
    seed = options.seed
    make_folder(out)
    copy_frozen_parts(out)
    write_prompts(out, seed)
    build_reference_statistics(out, seed, clips_per_caption=REFERENCE_CLIPS, from_middle=True)
    build_policy(out, seed)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
