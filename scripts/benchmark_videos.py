"""Make the videos of a public benchmark for several policies, under the names that its official tool
reads (docs/appendix.md#benchmarks).

    python -m scripts.benchmark_videos --layout vbench --prompts VBench_full_info.json --output_dir outputs/vbench \\
        --policies base base@6 tuned=outputs/run --config configs/hunyuanvideo15_480p_8gpu.yaml

Writes <output_dir>/<policy>/videos and keeps complete videos; torchrun shares the videos. Policies
are as in scripts.compare_policies; `@6` sets the guidance scale. It accepts every flag of
post_train.py; validation sets frames, size, shift, steps and guidance. Every video has a separate
seed, the same for all policies, which depends on validation_seed.
"""

from pathlib import Path

from hyvideo.checks.rules import check_sampling
from hyvideo.data.prompts import read_requests
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.settings.command_line import parse


@exit_on_error("benchmark_videos.py")
def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--layout", choices=["vbench", "vbench2"], required=True, help="names of the videos"
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="official list, such as VBench_full_info.json"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        required=True,
        metavar="NAME=PATH",
        help="base, base@6 or NAME=PATH",
    )
    parser.add_argument(
        "--dimensions", nargs="+", default=[], help="dimensions to make videos for (all)"
    )
    parser.add_argument(
        "--videos_per_prompt", type=int, metavar="N", help="number of videos (the official one)"
    )
    parser.add_argument(
        "--augmented", help="CSV of prompts to sample instead, with a column original_prompt"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--dry_run", action="store_true", help="print the number of videos and exit"
    )
    options, flags = parser.parse_known_args(argv)
    config = parse(flags).config
    model = config.model
    check_sampling(
        config.validation_sampling,
        root=model.pretrained_model_root,
        version=model.transformer_version,
        output=options.output_dir,
    )

    from studies.benchmarks import LAYOUTS, list_clips, make_videos  # slow to import
    from studies.figures.named_policies import read_policies

    clips = list_clips(
        LAYOUTS[options.layout],
        options.prompts,
        dimensions=options.dimensions,
        num_videos=options.videos_per_prompt,
    )
    policies = read_policies(options.policies, config.validation_sampling)
    rewritten = {}
    if options.augmented:
        for request in read_requests(options.augmented):
            rewritten[request.original_prompt or request.prompt] = request.prompt
    seconds = config.validation_sampling.frames / config.data.fps
    print(f"{len(clips)} videos of {seconds:.2f} s for each of {len(policies)} policies")
    if not options.dry_run:
        make_videos(config, policies, clips, rewritten, options.output_dir)


if __name__ == "__main__":
    main()
