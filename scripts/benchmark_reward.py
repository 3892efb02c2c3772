"""What scoring costs: clips in batches against one by one, and what of it an iteration of the miniature waits for.

    python -m scripts.benchmark_reward                        # the miniature's own reward model, and an iteration
    python -m scripts.benchmark_reward --reward_model videoalign --model_path ckpts    # on a GPU: only the clips

Ratios and medians of one run.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from hyvideo.config.command_line import load_config
from hyvideo.distributed.mesh import Mesh
from hyvideo.models.reward_models.rewards import Scorer, make_scorer
from hyvideo.models.reward_models.trial_clips import Trial, miniature_trial, synthetic_trial
from hyvideo.trainer import Trainer
from hyvideo.training.model_setup import choose_device

CONFIG = "configs/miniature.yaml"


def compare_batches(scorer: Scorer, trial: Trial, count: int, repeats: int) -> None:
    """Prints clips per second together and one by one."""

    def together() -> None:
        scorer.score([trial.video] * count, [trial.prompt] * count, fps=trial.fps)

    def one_by_one() -> None:
        for _ in range(count):
            scorer.score([trial.video], [trial.prompt], fps=trial.fps)

    times = {call: [] for call in (together, one_by_one)}
    for call in times:
        call()  # warms up
    for _ in range(repeats):
        for call, seconds in times.items():
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    for call, seconds in times.items():
        print(f"{call.__name__:>10}: {count / statistics.median(seconds):8.1f} clips/s")
    ratio = statistics.median(b / a for a, b in zip(*times.values()))
    print(f"together is {ratio:.2f} times as fast")


def share_of_waiting(reward_model: str, iterations: int) -> None:
    """Prints which part of an iteration scoring takes, and which part is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            CONFIG,
            reward_model=[reward_model],
            # two batches of rollouts, so that the first is scored while the second is sampled
            batch_size=16,
            gradient_accumulation_steps=2,
            output_dir=str(Path(folder)),
            valid_video_csv="",
            log_video_interval=0,
        )
        torch.set_num_threads(config.model.num_threads)
        trainer = Trainer(config, Mesh(rank=0, world_size=1, sp_size=1), torch.device("cpu"))
        lines = []
        for _ in range(iterations):
            trainer.iteration += 1
            lines.append(trainer.run_iteration())
    for name, what in (("time/scoring", "scoring, beside other work"), ("time/reward", "waiting for rewards")):
        share = statistics.median(line[name] / line["time/iteration"] for line in lines[1:])
        print(f"{what:>27}: {share:6.1%} of an iteration with {reward_model}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward_model", default="videoalign_local")
    parser.add_argument("--model_path", help="checkpoint folder; the miniature's by default")
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    is_miniature = options.model_path is None
    device = choose_device("cpu" if is_miniature else "auto")
    scorer = make_scorer(options.reward_model, options.model_path or "assets/miniature", device=device)
    compare_batches(scorer, miniature_trial() if is_miniature else synthetic_trial(81), options.clips, options.repeats)
    if is_miniature:
        share_of_waiting(options.reward_model, 5)


if __name__ == "__main__":
    main()
