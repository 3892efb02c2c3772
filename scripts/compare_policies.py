"""Compare policies on the same prompts and seeds: as mp4 files, one image and one moving picture
(figures 6 and 10 to 12), or by their scores.

    python -m scripts.compare_policies --config configs/miniature.yaml --output_dir outputs/policies \\
        --policies base sage=outputs/miniature --prompt "a green triangle moves left" "a red circle moves up"
    python -m scripts.compare_policies --config configs/hunyuanvideo15_480p_8gpu.yaml --valid_video_csv prompts.csv \\
        --output_dir outputs/policies --policies base sage=outputs/run lora=my_lora
    torchrun --nproc_per_node=8 -m scripts.compare_policies ...                         on several GPUs
    python -m scripts.compare_policies --scores base=outputs/run/samples/000000 trained=outputs/run/samples/000018

A policy is `base` (the base model of the settings) or NAME=PATH, where PATH is a run (its newest
checkpoint is used), a checkpoint, or a LoRA file or folder; `base@6` and NAME=PATH@6 have guidance
scale 6, and NAME=PATH@4steps takes four sampling steps. Accepts every flag of post_train.py. Videos
have the frames, size, shift and steps of validation. Their noise is the noise that generate.py
draws for the seed validation_seed; validation draws another one. The prompts are rows spread evenly
over valid_video_csv, unless --prompt gives them. Writes policies.png, policies.webp and one folder
per policy to --output_dir; `python -m scripts.report --videos` plays two of the folders side by
side.

With --scores, nothing is sampled. It reads the scores.json of validations or of scripts.evaluate, of
which the first is the base, and prints for each score the mean gain over the base with bootstrap
intervals, the share of videos that won, and the gain of the videos whose base scored below and above
its mean.
"""

from pathlib import Path

from hyvideo.checks.rules import check_sampling, with_local_weights
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.text import quote
from hyvideo.records.progress_bar import print_stage
from hyvideo.settings import processes
from hyvideo.settings.command_line import parse
from studies.figures.named_policies import read_policies


@exit_on_error("compare_policies.py")
def main(argv: list[str] | None = None) -> None:
    processes.prepare()
    parser = Parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--policies", nargs="+", metavar="NAME=PATH", help="policies: base or NAME=PATH"
    )
    what.add_argument(
        "--scores",
        nargs="+",
        metavar="NAME=PATH",
        help="scores.json files or their folders, first that of the base",
    )
    parser.add_argument("--prompt", nargs="+", help="prompts to use instead of valid_video_csv")
    parser.add_argument(
        "--num_prompts", type=int, default=8, help="number of rows of valid_video_csv to use"
    )
    parser.add_argument("--output_dir", type=Path, help="output folder for images and videos")
    options, flags = parser.parse_known_args(argv)
    config = parse(flags).config
    if options.scores:
        print(compare_scores(options.scores))
        return
    if not options.output_dir:
        raise ValueError("no folder for images and videos: give --output_dir")
    if not (options.prompt or config.data.valid_video_csv):
        raise ValueError("no prompts: give --prompt or --valid_video_csv")
    root = config.model.pretrained_model_root
    check_sampling(
        config.validation_sampling,
        root=root,
        version=config.model.transformer_version,
        output=options.output_dir,
    )

    policies = read_policies(options.policies, config.validation_sampling)

    print_stage("importing torch and the models")
    from studies.figures.policies import compare  # slow to import

    compare(
        with_local_weights(config),
        policies,
        prompts=options.prompt or [],
        num_prompts=options.num_prompts,
        out=options.output_dir,
    )


def compare_scores(words: list[str]) -> str:
    """Return a table of the gains of policies over the first one, which are given as NAME=PATH.

    Raises ValueError for fewer than two, for files without scores, and for videos that differ.
    """
    from hyvideo.validation.paired import as_table, paired_gains, read_scores

    scores = {}
    for word in words:
        name, has_path, path = word.partition("=")
        if not has_path or name in scores:
            raise ValueError(f"scores must be NAME=PATH with different names, got {quote(word)}")
        scores[name] = read_scores(Path(path))
    if len(scores) < 2:
        raise ValueError(f"scores must name the base and a policy, got {quote(words[0])} alone")
    (_, base), *policies = scores.items()
    return as_table({name: paired_gains(base, videos) for name, videos in policies})


if __name__ == "__main__":
    main()
