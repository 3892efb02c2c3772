"""Train a reward model on rated pairs of videos, as described in docs/preference_study.md.

    python -m scripts.train_reward --pairs outputs/study/pairs.csv --reward_path ckpts/VideoReward \\
        --output_dir outputs/own/VideoReward --dimensions SIZE
"""

import json
import sys
from pathlib import Path

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.files import remove_partial
from hyvideo.data.run_folder import Lease
from hyvideo.data.text import align_columns

MIN_PREFERENCES = 30  # the 95 % interval of an accuracy of 0.7 is then about 0.3 wide
FIT = ("learning_rate", "weight_decay", "lora_rank", "seed", "max_epochs")


@exit_on_error("train_reward.py", (ValueError, OSError, FloatingPointError))
def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--pairs", type=Path, required=True, help="CSV: prompt, first, second, dimension, answer"
    )
    parser.add_argument(
        "--reward_path", type=Path, required=True, help="VideoReward folder to start from"
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="VideoReward folder to write"
    )
    parser.add_argument(
        "--dimensions", nargs="+", metavar="NAME", help="up to three names in place of VQ, MQ, TA"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of split, new LoRA and order of pairs"
    )
    parser.add_argument("--learning_rate", type=float, default=1e-5, help="initial learning rate")
    parser.add_argument(
        "--weight_decay", type=float, default=0.0, help="weight decay of LoRA and head"
    )
    parser.add_argument("--batch_size", type=int, default=8, help="pairs per update")
    parser.add_argument("--lora_rank", type=int, default=64, help="rank of the LoRA if it is new")
    parser.add_argument("--max_epochs", type=int, default=10, help="maximum number of epochs")
    options = parser.parse_args()
    if not (
        0 < options.learning_rate < 1
        and min(options.batch_size, options.lora_rank, options.max_epochs) > 0
    ):
        raise ValueError(
            "--learning_rate must be in (0, 1); --batch_size, --lora_rank and --max_epochs positive"
        )
    if not 0 <= options.weight_decay < float("inf"):
        raise ValueError(f"--weight_decay must be at least 0, got {options.weight_decay:g}")

    from hyvideo.records.run_files import write_text
    from hyvideo.rewards.videoalign.checkpoint import check_dimensions, find_checkpoint
    from studies.reward_training import (
        PairTraining,
        check_room,
        check_videos,
        read_pairs,
        split_by_prompt,
    )

    reject_model(options.output_dir)
    known = find_checkpoint(options.reward_path).settings.dimensions
    names = check_dimensions(options.dimensions or known, "--dimensions")
    pairs = read_pairs(options.pairs, names)
    # Names that are new at their token.
    moved = [
        name for token, name in enumerate(names) if token >= len(known) or known[token] != name
    ]
    split = split_by_prompt(pairs, moved if pairs else names, options.seed)
    with Lease(options.output_dir):
        reject_model(options.output_dir)  # of a process that has ended since
        remove_partial(options.output_dir)
        check_videos(pairs)  # before hours of training
        training = PairTraining(options.reward_path, split, names, options.batch_size)
        check_room(options.output_dir, training.scorer.model)
        report: dict = {"pairs": {part: len(members) for part, members in split.items()}}
        report["before"] = training.quality(options.output_dir / "calibration_before.png")
        report["losses"] = training.fit(**{name: getattr(options, name) for name in FIT})
        training.write(options.output_dir)
        report["after"] = training.quality(options.output_dir / "calibration.png")
        write_text(options.output_dir / "training.json", json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))
    return 0


def reject_model(folder: Path) -> None:
    """Raise ValueError if a folder has a reward model, or its weights."""
    if (folder / "model_config.json").exists() or (folder / "checkpoint-1").exists():
        raise ValueError(
            f"--output_dir must not contain a model, but {folder} does; choose another folder"
        )


def table(report: dict) -> list[str]:
    """Return the results on the prompts held out for them as aligned lines."""
    rows = [("dimension", "preferences", "accuracy before", "after", "loss before", "after")]
    for name, after in report["after"].items():
        few = (
            f" (too few: below {MIN_PREFERENCES})" if after["preferences"] < MIN_PREFERENCES else ""
        )
        numbers = [
            f"{part[key]:.3f}"
            for key in ("accuracy", "loss")
            for part in (report["before"][name], after)
        ]
        rows.append((name, f"{after['preferences']}{few}", *numbers))
    return align_columns(rows)


if __name__ == "__main__":
    sys.exit(main())
