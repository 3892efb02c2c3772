"""Rated pairs of random videos, for tests of objective dpo."""

import csv
from pathlib import Path

import torch

from hyvideo.data.videos import write_video

PROMPTS = (
    "a red circle moves up",
    "a green square moves down",
    "a blue circle moves left",
    "a red square moves right",
)
# Settings of tiny_config (5 frames of 16 x 16) that train on such pairs.
DPO = {
    "objective": "dpo",
    "dpo_beta": 20.0,
    "nft_levels": 2,
    "batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "mini_batch_size_per_update": 2,
    "cfg_scale": 1.0,
    "kl_strategy": "fixed",
    "kl_schedule": "constant",
    "kl_weight": 0.5,
    "learning_rate": 1e-3,
}


def write_clip(
    path: Path, seed: int, size: tuple[int, int, int] = (5, 16, 16), fps: float = 8
) -> None:
    """Write a random video of (frames, height, width)."""
    frames, height, width = size
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (frames, 3, height, width), generator=random)
    write_video(path, pixels.to(torch.uint8), fps=fps)


def write_pairs(
    folder: Path, rows=None, columns=("prompt", "first", "second", "answer"), fps: float = 8
) -> Path:
    """Write two videos of each prompt and a CSV with one answer for each, or with the
    given rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2 * len(PROMPTS)):
        video = folder / f"{number // 2}{'ab'[number % 2]}.mp4"
        if not video.is_file():
            write_clip(video, number, fps=fps)
    if rows is None:
        answers = ("first", "second", "first", "first")
        rows = [(p, f"{k}a.mp4", f"{k}b.mp4", a) for k, (p, a) in enumerate(zip(PROMPTS, answers))]
    path = folder / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path
