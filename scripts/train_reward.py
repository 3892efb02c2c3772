"""Train a reward model on rated pairs of videos, as described in docs/ratings.md#blind-preference-study.

    python -m scripts.train_reward --pairs outputs/study/pairs.csv --reward_path ckpts/VideoReward \\
        --output_dir outputs/own/VideoReward --dimensions SIZE
"""

import sys
from pathlib import Path

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.text import align_columns

MIN_PREFERENCES = 30  # the 95 % interval of an accuracy of 0.7 is then about 0.3 wide


@exit_on_error("train_reward.py", (ValueError, OSError, FloatingPointError))
def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--pairs", type=Path, required=True, help="table of rated pairs, as in docs/ratings.md"
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

    from hyvideo.ratings.reward_training import train  # slow to import

    report = train(
        options.pairs,
        options.reward_path,
        options.output_dir,
        dimensions=options.dimensions,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        lora_rank=options.lora_rank,
        seed=options.seed,
        max_epochs=options.max_epochs,
    )
    print("\n".join(table(report)))
    return 0


def table(report: dict) -> list[str]:
    """Return the results on the prompts held out for them as aligned lines."""
    rows = [("dimension", "preferences", "accuracy before", "after", "loss before", "after")]
    for name, after in report["after"].items():
        before = report["before"][name]
        preferences = str(after["preferences"])
        if after["preferences"] < MIN_PREFERENCES:
            preferences += f" (too few: below {MIN_PREFERENCES})"
        numbers = [before["accuracy"], after["accuracy"], before["loss"], after["loss"]]
        rows.append((name, preferences, *(f"{number:.3f}" for number in numbers)))
    return align_columns(rows)


if __name__ == "__main__":
    sys.exit(main())
