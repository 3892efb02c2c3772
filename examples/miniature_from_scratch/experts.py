"""Make a miniature of two experts, as Wan2.2 A14B has, from the miniature of Wan2.1:
``python -m examples.miniature_from_scratch.experts``, about five minutes.

The high-noise expert is that miniature, and the low-noise expert a copy that is trained further at
its own noise levels. All other parts are links.
"""

import json
import os
from pathlib import Path

from examples.miniature_from_scratch.base_policy import caption_texts, train_policy, web_videos
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import make_folder
from hyvideo.models.family import prepare
from hyvideo.models.loading import load_transformer, load_vae
from hyvideo.models.versions import version_defaults

SOURCE = Path("assets/miniature_wan")
VERSION = "miniature_wan_experts"
STEPS = 400
WEB_CLIPS = 48 * 40  # a multiple of 48


def link_shared_parts(out: Path, boundary: float) -> None:
    """Link what both miniatures share, and write a model_index.json with the boundary."""
    shared = "text_encoder tokenizer scheduler vae transformer reference_statistics.safetensors"
    for part in shared.split():
        target = os.path.relpath(SOURCE / part, out)
        (out / part).symlink_to(target)
    index = json.loads((SOURCE / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": boundary}
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


@exit_on_error("examples.miniature_from_scratch.experts")
def main() -> None:
    parser = Parser(__doc__.splitlines()[0], prog="examples.miniature_from_scratch.experts")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("ckpts/miniature_wan_experts"),
        help="folder to write",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the training")
    options = parser.parse_args()
    out = options.output_dir
    boundary = version_defaults(VERSION).boundary
    make_folder(out)
    link_shared_parts(out, boundary)
    vae = load_vae(out)
    transformer = load_transformer(SOURCE, "miniature_wan")
    prepare(transformer, {"text"})
    train_policy(
        transformer,
        web_videos(vae, options.seed, number=WEB_CLIPS),
        caption_texts(out, vae),
        num_steps=STEPS,
        seed=options.seed,
        below=boundary,
    )
    transformer.half().save_pretrained(out / "transformer_2")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
