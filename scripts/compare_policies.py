"""Compare policies on the same prompts and seeds, as mp4 files, one image and one moving picture:
figures 6 and 10 to 12.

    python -m scripts.compare_policies --config configs/miniature.yaml --output_dir outputs/policies \\
        --policies base sage=outputs/miniature --prompt "a green triangle moves left" "a red circle moves up"
    python -m scripts.compare_policies --config configs/hunyuanvideo15_480p_8gpu.yaml --valid_video_csv prompts.csv \\
        --output_dir outputs/policies --policies base sage=outputs/run lora=my_lora
    torchrun --nproc_per_node=8 -m scripts.compare_policies ...                         on several GPUs

A policy is `base` (the base model of the settings) or NAME=PATH, where PATH is a run (its newest
checkpoint is used), a checkpoint, or a LoRA file or folder; `base@6` and NAME=PATH@6 have guidance
scale 6, and NAME=PATH@4steps takes four sampling steps. Accepts every flag of post_train.py. Videos
have the frames, size, shift and steps of validation. Their noise is the noise that generate.py
draws for the seed validation_seed; validation draws another one. The prompts are rows spread evenly
over valid_video_csv, unless --prompt gives them. Writes policies.png, policies.webp and one folder
per policy to --output_dir; `python -m scripts.report --videos` plays two of the folders side by
side.
"""

from pathlib import Path

from hyvideo.checks.rules import check_sampling, with_local_weights
from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.settings.command_line import parse


@exit_on_error("compare_policies.py")
def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--policies",
        nargs="+",
        required=True,
        metavar="NAME=PATH",
        help="policies: base or NAME=PATH",
    )
    parser.add_argument("--prompt", nargs="+", help="prompts to use instead of valid_video_csv")
    parser.add_argument(
        "--num_prompts", type=int, default=8, help="number of rows of valid_video_csv to use"
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="output folder for images and videos"
    )
    options, flags = parser.parse_known_args(argv)
    config = parse(flags).config
    if not (options.prompt or config.data.valid_video_csv):
        raise ValueError("no prompts: give --prompt or --valid_video_csv")
    root = config.model.pretrained_model_root
    check_sampling(
        config.validation_sampling,
        root=root,
        version=config.model.transformer_version,
        output=options.output_dir,
    )

    from studies.figures.policies import compare  # slow to import

    compare(
        with_local_weights(config),
        options.policies,
        prompts=options.prompt or [],
        num_prompts=options.num_prompts,
        out=options.output_dir,
    )


if __name__ == "__main__":
    main()
