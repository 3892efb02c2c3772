"""Make preference pairs of scored pictures of the model, for `objective dpo`.

    python -m scripts.improve --config examples/galaxies/improve.yaml --num_videos 32
    python -m examples.galaxies.pairs outputs/galaxies/improve/round1/scores

writes pairs.csv beside videos.csv. The picture of the higher score is preferred.
"""

import argparse
import csv
import random
from collections import defaultdict
from pathlib import Path

COLUMNS = ("prompt", "first", "second", "answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of scripts.evaluate, with videos.csv")
    parser.add_argument("--pairs", type=int, default=25, help="pairs of each prompt")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of pairs")
    options = parser.parse_args()
    with (options.folder / "videos.csv").open(encoding="utf-8") as file:
        pairs = choose(list(csv.DictReader(file)), options.pairs, options.seed)
    with (options.folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(pairs)
    print(f"wrote {len(pairs)} pairs to {options.folder / 'pairs.csv'}")


def choose(rows: list[dict[str, str]], count: int, seed: int) -> list[tuple[str, str, str, str]]:
    """Return prompt, first and second file and answer of ``count`` pairs of each prompt, or all if
    there are fewer. Pictures of the same score are not compared.
    """
    by_prompt = defaultdict(list)
    for row in rows:
        if row["score"]:
            by_prompt[row["prompt"]].append((row["video"], float(row["score"])))
    chosen = []
    for prompt, pictures in by_prompt.items():
        pairs = [
            (prompt, first, second, "first" if score > other else "second")
            for first, score in pictures
            for second, other in pictures
            if first < second and score != other
        ]
        chosen += random.Random(f"{seed} {prompt}").sample(pairs, min(count, len(pairs)))
    return chosen


if __name__ == "__main__":
    main()
