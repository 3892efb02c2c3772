"""Folders of synthetic runs, written by the code that writes the records of real runs."""

import math
import time

import torch

from hyvideo.loss.metrics import quantiles
from hyvideo.records.metrics import MetricsWriter
from hyvideo.records.run_config import write_config
from hyvideo.records.run_files import score_entry, write_json
from hyvideo.records.saved_videos import write_videos
from hyvideo.records.timeline import write_timeline
from hyvideo.rewards.rewards import Reward
from hyvideo.settings.command_line import load_config
from hyvideo.validation.held_out import Dispersion, ValidationStats, Verdict, write_validation

HOSTILE = '</script><script>window.hacked = 1</script> "quoted" & {{ 7 * 7 }}'
PROMPTS = [HOSTILE, *(f"prompt {k}" for k in range(7))]
CPU = torch.device("cpu")


def record_run(
    folder,
    *,
    gains=(0.2, 0.3),
    sharpness=0.0,
    missing=0,
    clocks=(10.0, 20.0, 30.0),
    last=2,
    validations=(0, 3),
    **settings,
):
    """Write three iterations, with validations of every prompt; the gains are used in turn.

    Args:
        sharpness: Shift of a held-out metric, in base standard deviations.
        missing: Number of missing rewards in iteration 2.
        clocks: Seconds since the start of the process at the end of each iteration.
        last: Number of the last video with an mp4 file.
        validations: Iterations with a validation; the gains grow linearly up to iteration 3.
    """
    config = load_config("configs/smoke.yaml", output_dir=str(folder), **settings)
    folder.mkdir(parents=True)
    write_config(folder, config.flat(), CPU, 1)
    with MetricsWriter(
        folder, report_to=[], run_name="", config={}, resume_iteration=None
    ) as writer:
        for iteration, clock in enumerate(clocks, 1):
            num_missing = missing if iteration == 2 else 0
            grown = 1 + 0.1 * iteration
            numbers = {"reward/mean": grown, "reward/VQ": grown / 2, "reward/missing": num_missing}
            numbers |= {"kl/position": 1e-3 * grown, "kl/coef": 0.25, "policy/clip_fraction": 0.0}
            numbers |= {
                "advantage/zero_groups": 1.0,
                "update/skipped": 0.0,
                "grad/norm": grown,
                "grad/spike": 1.0,
            }
            numbers |= {
                "time/iteration": 9.0,
                "time/update": 4.0,
                "time/rollout": 5.0,
                "time/since_start": clock,
                "time/cpu": 8.0,
            }
            numbers |= {"perf/tflops/update": 2.0 * grown, "perf/mfu/update": 0.4 * grown}
            numbers |= {"quantiles/reward": quantiles(torch.arange(8.0) + grown)}
            steps = {"by_step/kl": [0.1, 0.2, None], "by_step/ratio_mean": [1.0, 1.1, None]}
            writer.log(
                numbers | steps | {"by_step/ratio_max_deviation": [0.0, 0.2, None]}, iteration
            )
    seconds = time.perf_counter()
    spans = [
        ("rollout", (seconds, seconds + 5)),
        ("scoring", (seconds + 1, seconds + 3)),
        ("writing", (seconds,)),
    ]
    write_timeline(folder, 3, seconds, spans)
    for iteration in validations:
        share = iteration / 3
        place = folder / "samples" / f"{iteration:06d}"
        rewards = [0.1 * k + share * gains[k % len(gains)] for k in range(len(PROMPTS))]
        clips = {
            k: torch.full((9, 3, 32, 32), 20 * k + int(100 * share), dtype=torch.uint8)
            for k in range(last + 1)
        }
        names = write_videos(place, clips, 8.0)
        scored = [Reward(reward, {"VQ": reward}) for reward in rewards]
        entries = [
            score_entry(prompt, 930, k, scored[k], file=names.get(k), advantage=math.nan, number=k)
            for k, prompt in enumerate(PROMPTS)
        ]
        write_json(place / "scores.json", entries)
        means = {
            "reward": sum(rewards) / len(rewards),
            "held_out/sharpness": 0.5 + share * sharpness * 0.1,
        }
        means |= {"true/VQ": 0.3 + share * gains[0] / 2, "held_out/motion": 0.5 - share * 0.03}
        spreads = {"reward": Dispersion(0.2, 96), "held_out/sharpness": Dispersion(0.1, 96)}
        spreads |= {"true/VQ": Dispersion(0.2, 96), "held_out/motion": Dispersion(0.1, 96)}
        stats = ValidationStats(iteration, means, spreads)
        write_validation(place, stats, Verdict(), {"steps": 4})
    if missing:
        place = folder / "rollouts" / "000002"
        place.mkdir(parents=True)
        lost = [Reward(math.nan, {}, "the service was away")] * missing
        write_json(
            place / "scores.json",
            [
                score_entry("p", 0, 0, r, file=None, advantage=math.nan, number=k)
                for k, r in enumerate(lost)
            ],
        )
    return folder
