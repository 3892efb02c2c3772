"""Make a gallery: moving pictures of several policies, of the same prompts and noise, on a page.

    python -m scripts.make_gallery --pictures docs/pictures                     the pictures of docs/gallery.md
    python -m scripts.make_gallery --config configs/wan21_1gpu_nft.yaml --output_dir outputs/wan_gallery \\
        --policies base base@5 nft=outputs/run --prompt "a cat jumps" "a red kite over a beach"

Without --policies, it first trains the runs of docs/gallery.md on the miniature, which takes about
half an hour on a CPU; finished runs are kept. A policy is a word of scripts.compare_policies, and
all flags of that program are accepted. Writes gallery.md, the videos and the pictures to
--output_dir. If policies are runs with a report, it also makes screenshots of the first and the last
report and of the rating page, in Chromium.
"""

import sys
from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.settings.command_line import parse


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--policies", nargs="+", metavar="NAME=PATH", help="policies: base or NAME=PATH"
    )
    parser.add_argument("--prompt", nargs="+", default=[], help="prompts of the videos")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/gallery"), help="output folder"
    )
    parser.add_argument(
        "--pictures", type=Path, help="folder of the pictures (default: the output folder)"
    )
    options, flags = parser.parse_known_args(argv)
    out = options.output_dir
    policies = options.policies
    prompts = options.prompt
    if not policies:
        flags = ["--config", "configs/miniature.yaml", *flags]
    parse(flags)  # stops at wrong flags before hours of training

    from studies.figures import gallery  # slow to import

    with exit_on_error("make_gallery.py", (ValueError, OSError)):
        if not policies:
            policies, code = gallery.train_miniatures(out)
            if code:
                return code
            prompts = prompts or gallery.PROMPTS
        return gallery.make_gallery(policies, prompts, flags, out, options.pictures or out)


if __name__ == "__main__":
    sys.exit(main())
