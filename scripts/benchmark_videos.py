"""Make the videos of VBench and VBench-2.0 for several policies, and compare their results
(docs/benchmarks.md).

    python -m scripts.benchmark_videos make --prompts VBench_full_info.json --output_dir outputs/vbench \\
        --policies base base@6 tuned=outputs/run --config configs/hunyuanvideo15_480p_8gpu.yaml
    python -m scripts.benchmark_videos read --results base=base/results tuned=tuned/results --output_dir outputs/vbench

`make` writes <output_dir>/<policy>/videos in the layout of the official tool, skips complete videos
and prints the official commands; torchrun shares the videos. Policies are as in
scripts.compare_policies; `@6` sets the guidance scale. It accepts every flag of post_train.py;
validation sets frames, size, shift, steps and guidance. Every video has a separate seed, the same
for all policies, which depends on validation_seed. `read` compares the official result files of
each policy with the first policy, and writes table.md and benchmarks.json. Several results with one
name are runs of one policy.
"""

from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error, truth
from hyvideo.data.files import make_folder
from hyvideo.settings.command_line import parse


def build_parser() -> Parser:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="make the videos")
    make.add_argument(
        "--prompts", type=Path, required=True, help="official list, such as VBench_full_info.json"
    )
    make.add_argument(
        "--policies",
        nargs="+",
        required=True,
        metavar="NAME=PATH",
        help="base, base@6 or NAME=PATH",
    )
    make.add_argument(
        "--dimensions", nargs="+", default=[], help="dimensions to make videos for (all)"
    )
    make.add_argument(
        "--videos_per_prompt",
        type=int,
        choices=range(1, 26),
        metavar="N",
        help="number of videos per prompt (the official one)",
    )
    make.add_argument(
        "--any_list",
        type=truth,
        default=False,
        metavar="BOOL",
        help="accept other numbers of prompts",
    )
    make.add_argument(
        "--augmented", help="CSV of prompts to sample instead, with a column original_prompt"
    )
    make.add_argument("--dry_run", action="store_true", help="print the number of videos and exit")
    read = commands.add_parser("read", help="compare official results")
    read.add_argument(
        "--results",
        nargs="+",
        required=True,
        metavar="NAME=PATH",
        help="result files or their folders",
    )
    for command in (make, read):
        command.add_argument(
            "--output_dir", dest="out", type=Path, required=True, help="output folder"
        )
    return parser


@exit_on_error("benchmark_videos.py")
def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options, flags = parser.parse_known_args(argv)
    if options.command == "make":
        config = parse(flags).config

        from studies.benchmarks.make import make_all  # slow to import

        return make_all(
            config,
            options.prompts,
            options.policies,
            options.out,
            dimensions=options.dimensions,
            videos_per_prompt=options.videos_per_prompt,
            is_official=not options.any_list,
            augmented=options.augmented,
            dry_run=options.dry_run,
        )
    options = parser.parse_args(argv)

    from studies.benchmarks.results import read_results
    from studies.benchmarks.table import make_table, write_tables

    make_folder(options.out)
    print(
        write_tables(options.out, [make_table(*found) for found in read_results(options.results)])
    )


if __name__ == "__main__":
    main()
