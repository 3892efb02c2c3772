"""A custom objective with settings and data of its own: supervised finetuning on videos of a CSV
file, for ``--objective``; see docs/add_an_objective.md.

    python post_train.py --config configs/miniature_nft.yaml --output_dir outputs/finetuned \
        --objective examples/custom_data.py:Finetuning --videos_csv videos.csv --eta 0
"""

from pathlib import Path
from typing import ClassVar

import torch

from hyvideo.data.csv_files import read_rows
from hyvideo.data.examples import Example, Examples
from hyvideo.data.files import find_path
from hyvideo.data.prompts import Request
from hyvideo.grpo.nft import mean_square
from hyvideo.settings.sections import Section, learning
from hyvideo.training.objective import LevelObjective, Terms
from hyvideo.training.rollout_batch import select


class Settings(Section):
    """Settings that only this objective has."""

    videos_from: ClassVar[str] = "videos_csv"  # no rollouts are sampled

    videos_csv: list[str] = learning(
        [], "Videos to train on, CSV files: `prompt`, `video`.", is_path=True, min_length=1
    )

    def read_videos(self, seed: int) -> Examples:
        """Return a training example for each row; paths are relative to the folder of the CSV."""
        examples = []
        for path in map(find_path, self.videos_csv):
            rows = read_rows(path, "videos_csv", ("prompt", "video"))
            for number, row in enumerate(rows, 1):
                place = f"row {number} of {path}"
                video = Path(path).parent / row.get("video", "")
                if not video.is_file():
                    raise ValueError(f"videos_csv must name existing videos, got {video}, {place}")
                examples.append(Example(Request(row["prompt"]), (video,), place))
        return Examples(examples)


class Finetuning(LevelObjective):
    """Regression of the velocity on re-noised videos, plus the KL to the anchor."""

    Settings = Settings
    metrics = ("loss/total", "kl/position", "finetuning/error")
    needs_rewards = False
    uses_advantages = False

    def terms(self, rollouts, reference, rows, column, *, kl_coefficient):
        velocity, target = self.velocity_and_target(rollouts, rows, column)
        error = mean_square(velocity - target)
        kl = torch.zeros_like(error)
        if column in reference:  # the anchor's velocities
            kl = mean_square(velocity - select(reference[column], rows))
        loss = error + kl_coefficient * kl
        return Terms(
            loss=loss,
            kl=kl,
            deviation=torch.zeros_like(error),  # not measured
            metrics={"loss/total": loss, "kl/position": kl, "finetuning/error": error},
        )
