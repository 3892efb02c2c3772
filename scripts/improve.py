"""From prompts to a better model: sample videos, score or rate them, fine-tune the model on the
better ones.

    python -m scripts.improve --config configs/miniature_sft.yaml --prompts_csv prompts.csv [flags of post_train.py]

Each step is a command that it prints: generate.py, scripts.evaluate, post_train.py. With --rate true,
you keep or drop each video in a browser (scripts.rate) in place of the scores. The same command again
continues after an interruption. The training validates the model before and after on
valid_video_csv. docs/ratings.md#train-on-videos has results and costs.
"""

import sys
from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error, exit_on_interrupt, truth
from hyvideo.settings.command_line import parse


@exit_on_interrupt("improve.py")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__, usage="improve.py --config FILE.yaml --prompts_csv FILE.csv [flags]")
    parser.add_argument("--rounds", type=int, default=1, help="sample, score and train this often")
    parser.add_argument("--num_videos", type=int, default=4, help="videos per prompt and round")
    parser.add_argument(
        "--guidance_scale",
        type=float,
        help="guidance of the videos of the first round (default: that of the version)",
    )
    parser.add_argument(
        "--rate",
        type=truth,
        nargs="?",
        const=True,
        default=False,
        help="keep or drop each video yourself, and use no scores",
    )
    parser.add_argument("--num_gpus", type=int, default=1, help="processes that sample and train")
    parser.add_argument(
        "--improve_dir",
        type=Path,
        help="folder of all steps (default: the output_dir of the config)",
    )
    options, flags = parser.parse_known_args(argv)
    for name in ("rounds", "num_videos", "num_gpus"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    config = parse(flags).config

    from hyvideo.ratings.improvement import improve, plan_of  # after the flags: it imports torch

    with exit_on_error("improve.py"):
        plan = plan_of(
            config,
            options.rounds,
            options.num_videos,
            options.guidance_scale,
            num_gpus=options.num_gpus,
            rate=options.rate,
        )
        folder = options.improve_dir or Path(config.record.output_dir)
        return improve(plan, folder.resolve(), options.num_gpus)


if __name__ == "__main__":
    sys.exit(main())
