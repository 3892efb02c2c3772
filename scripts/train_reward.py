"""A reward from rated pairs: ``python -m scripts.train_reward --pairs pairs.csv --model VideoReward --out own/VideoReward``.

    python -m scripts.train_reward --pairs pairs.csv --model ckpts/VideoReward --out own/VideoReward
    python -m scripts.train_reward --pairs pairs.csv --model assets/miniature/VideoReward --out own/VideoReward \\
        --dimensions SIZE --learning_rate 1e-3 --lora_rank 16 --batch_size 32

Fine-tunes VideoAlign on a CSV with the columns prompt, first, second, dimension and answer (first, second, tie or
both_bad), as `scripts.preference_study analyse` writes it; videos are named from its folder. The folder that it leaves
is a reward for `--reward_model videoalign`: docs/own_reward.md. On one GPU, or on the CPU for the miniature.
"""

import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from hyvideo.data.outside import Parser, make_folder, refusals
from hyvideo.data.pairs import read_pairs, split_by_prompt


def parse():
    parser = Parser(__doc__)
    parser.add_argument("--pairs", required=True, help="CSV of rated pairs")
    parser.add_argument("--model", type=Path, required=True, help="folder VideoReward to start from")
    parser.add_argument("--out", type=Path, required=True, help="folder VideoReward to write")
    parser.add_argument("--dimensions", nargs="+", metavar="NAME", help="up to three, in place of VQ, MQ, TA, in order")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda where there is one")
    parser.add_argument("--seed", type=int, help="of the split by prompt, the new LoRA and the order of pairs; 0")
    parser.add_argument("--learning_rate", type=float, help="1e-5")
    parser.add_argument("--batch_size", type=int, help="pairs of videos in an update; 8")
    parser.add_argument("--max_epochs", type=int, help="10")
    parser.add_argument("--patience", type=int, help="epochs without a lower held-out loss before the end; 2")
    parser.add_argument("--lora_rank", type=int, help="of a new LoRA, where the model has none; 64")
    parser.add_argument("--theta", type=float, help="of the ties, above 1: the larger, the more of them; 5")
    return parser.parse_args()


@refusals("train_reward.py")
def main() -> int:
    options = parse()
    pairs = read_pairs(options.pairs)

    import torch  # after what can be refused without it

    from hyvideo.models.reward_models.videoalign.checkpoint import check_dimensions, find_checkpoint
    from hyvideo.models.reward_models.videoalign.training import Recipe, train_on_pairs

    recipe = Recipe(**{f.name: v for f in fields(Recipe) if (v := getattr(options, f.name)) is not None})
    known = find_checkpoint(options.model).settings.dimensions
    names = options.dimensions or known
    check_dimensions(names, "--dimensions")
    if others := Counter(pair.dimension for pair in pairs if pair.dimension not in names):
        told = ", ".join(f"{count} of {name}" for name, count in others.items())
        print(f"left out, as --dimensions does not name them: {told}", flush=True)
    split = split_by_prompt([p for p in pairs if p.dimension in names], set(names) - set(known), seed=recipe.seed)
    if options.out.exists() and options.out.samefile(options.model):
        raise ValueError(f"--out must be another folder than --model, got {options.out} twice")
    make_folder(options.out)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    report = train_on_pairs(options.model, options.out, split, names, recipe, device)
    for name, after in report["after"].items():
        before = report["before"][name]
        print(
            f"{name}: right in {before['accuracy']:.1%} before and {after['accuracy']:.1%} after of "
            f"{after['preferences']} preferences on unseen prompts, loss {before['loss']:.3f} and {after['loss']:.3f}"
        )
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
