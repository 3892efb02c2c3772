"""Rate the miniature's videos with a simulated person, for `objective dpo` or `objective sft`
(docs/ratings.md).

    python generate.py --config configs/miniature_dpo.yaml --valid_video_csv assets/miniature/prompts/train.csv \\
        --num_videos 6 --keep_latents --output_path outputs/rated
    python -m examples.simulated_study outputs/rated --pairs 100

writes outputs/rated/pairs.csv. The rater sees the true reward R of both videos
(`hyvideo/miniature/measures.py`) and prefers the first with probability sigmoid((R_first -
R_second) / 0.1), as noisily as people do.

    python -m examples.simulated_study outputs/rated --keep true

writes outputs/rated/videos.csv, as scripts.rate --keep does. The person keeps the better half of each
prompt's videos by the true reward, and gives the opposite answer for 10 % of the videos.
"""

import math
import os
from collections import defaultdict
from pathlib import Path

from hyvideo.data.examples import PAIRS_FILE, VIDEOS_FILE
from hyvideo.data.randomness import generator
from hyvideo.data.videos import at_original_size, read_video
from hyvideo.files.cli import Parser, exit_on_error, truth
from hyvideo.files.files import make_folder, publish, read_json
from hyvideo.files.tables import csv_text
from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.validation.video_folder import find_clips, write_videos_csv

ROOT = "assets/miniature"
WEIGHTS = {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
NOISE = 0.1  # difference of R at which the rater prefers the better video in 73 % of cases
SIDE = 32  # pixels
DIMENSION = "BETTER"  # name of the question, which scripts.train_reward needs


def true_rewards(folder: Path) -> dict[str, dict[str, float]]:
    """Return the true reward of each video of generate.py in a folder, by prompt and file name."""
    scorer = MiniatureScorer(ROOT)
    rewards: dict[str, dict[str, float]] = defaultdict(dict)
    paths = sorted(folder.glob("*.mp4"))
    if not paths:
        raise ValueError(f"folder must have the videos of generate.py, got no mp4 in {folder}")
    for path in paths:
        prompt = read_json(path.with_suffix(".json"), "settings of a video")["prompt"]
        video = at_original_size(read_video(path)[0], SIDE, SIDE)
        (scores,) = scorer.score([video], [prompt], fps=8)
        rewards[prompt][path.name] = sum(WEIGHTS[name] * scores[name] for name in WEIGHTS)
    return rewards


def rate(
    rewards: dict[str, dict[str, float]], count: int, seed: int
) -> list[tuple[str, str, str, str]]:
    """Return prompt, first and second video and answer of ``count`` different pairs of videos of a
    prompt.
    """
    random = generator(seed, "simulated rater")
    prompts = sorted(prompt for prompt, videos in rewards.items() if len(videos) > 1)
    possible = sum(math.comb(len(rewards[prompt]), 2) for prompt in prompts)
    if count > possible:
        raise ValueError(
            f"--pairs must be at most {possible}, the number of pairs of videos, got {count}"
        )
    rated: dict[tuple[str, frozenset], tuple[str, str, str, str]] = {}
    while len(rated) < count:
        prompt = prompts[random.integers(len(prompts))]
        first, second = random.permutation(sorted(rewards[prompt]))[:2].tolist()
        difference = rewards[prompt][first] - rewards[prompt][second]
        prefers_first = random.random() < 1 / (1 + math.exp(-difference / NOISE))
        answer = "first" if prefers_first else "second"
        rated.setdefault((prompt, frozenset((first, second))), (prompt, first, second, answer))
    return list(rated.values())


def keep(rewards: dict[str, dict[str, float]], errors: float, seed: int) -> dict[str, bool]:
    """Return for each video whether it is kept: the better half of each prompt's videos, rounded up,
    except for a share ``errors`` of opposite answers.
    """
    random = generator(seed, "simulated person")
    kept = {}
    for videos in rewards.values():
        ranked = sorted(videos, key=lambda name: -videos[name])
        best = ranked[: math.ceil(len(ranked) / 2)]
        for name in videos:
            is_wrong = random.random() < errors
            kept[name] = (name in best) != is_wrong
    return kept


@exit_on_error("simulated_study.py")
def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="videos of generate.py, with their JSON files")
    parser.add_argument("--pairs", type=int, default=100, help="number of pairs")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of pairs and of the rater"
    )
    parser.add_argument(
        "--keep",
        type=truth,
        default=False,
        help="keep or drop single videos in place of preferring one of a pair",
    )
    parser.add_argument(
        "--errors", type=float, default=0.1, help="with --keep, share of opposite answers"
    )
    parser.add_argument(
        "--output_dir", type=Path, help="folder of the CSV file (default: that of the videos)"
    )
    options = parser.parse_args()
    rewards = true_rewards(options.folder)
    out = options.output_dir or options.folder
    if options.keep:
        kept = keep(rewards, options.errors, options.seed)
        clips = find_clips(options.folder, [])
        answers = [int(kept[clip.path.name]) for clip in clips]
        make_folder(out)
        write_videos_csv(out / VIDEOS_FILE, clips, "keep", answers)
        print(f"kept {sum(answers)} of {len(answers)} videos in {out / VIDEOS_FILE}")
        return
    rows = rate(rewards, options.pairs, options.seed)
    write_pairs(out, options.folder, rows)


def write_pairs(out: Path, folder: Path, rows: list[tuple[str, str, str, str]]) -> None:
    """Write pairs.csv, whose paths are relative to its folder."""
    make_folder(out)
    columns = ["prompt", "first", "second", "answer", "dimension"]
    table = [
        [prompt, os.path.relpath(folder / first, out), os.path.relpath(folder / second, out)]
        + [answer, DIMENSION]
        for prompt, first, second, answer in rows
    ]
    with publish(out / PAIRS_FILE) as temporary:
        temporary.write_text(csv_text(columns, table))
    print(f"wrote {len(rows)} rated pairs to {out / PAIRS_FILE}")


if __name__ == "__main__":
    main()
