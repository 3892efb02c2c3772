"""The miniature's scorers: the true scores of a video, and the learned reward model."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hyvideo.files.files import folder_problem
from hyvideo.files.text import quote
from hyvideo.miniature.measures import features, frechet_distance, measure, moments
from hyvideo.miniature.world import FPS, labels_of
from hyvideo.rewards.rewards import DIMENSIONS

REFERENCE_STATISTICS = "reference_statistics.safetensors"


class MiniatureScorer:
    """Scorer of VQ, MQ and TA in [0, 1] from the pixels, and of a Fréchet distance if ``root`` has
    its statistics.
    """

    def __init__(self, root: str | Path, *, device: str | torch.device = "cpu"):
        problem = folder_problem(root)
        if problem:
            raise ValueError(f"the miniature's folder must exist, got {quote(root)}: {problem}")
        path = Path(root) / REFERENCE_STATISTICS
        self.reference = None
        if path.is_file():
            statistics = load_file(path)
            self.reference = statistics["mean"], statistics["covariance"]

    def score(
        self, videos: list[Tensor], prompts: list[str], *, fps: float
    ) -> list[dict[str, float]]:
        truth = measure(torch.stack(videos).cpu(), labels_of(prompts)).scores
        return [dict(zip(DIMENSIONS, row)) for row in truth.tolist()]

    def score_with_gradient(self, videos: Tensor, prompts: list[str], *, fps: float) -> Tensor:
        """Return the values of `score` with their gradient by the videos' levels in [0, 255].

        Shape: (videos, 3).
        """
        return measure(videos.cpu(), labels_of(prompts)).scores

    def check_prompts(self, prompts: list[str]) -> None:
        labels_of(prompts)

    def features(self, videos: list[Tensor], prompts: list[str]) -> Tensor:
        """Return the features of each video for `held_out`. Shape: (videos, dim)."""
        # One by one, so that a video's features do not depend on its rank's other videos, not even
        # by rounding.
        return torch.cat([features(video[None].cpu()) for video in videos])

    def held_out(self, features: Tensor) -> dict[str, float]:
        """Return the Fréchet distance of the whole set to clean videos."""
        if self.reference is None or len(features) < 2:
            return {}
        return {"frechet_distance": frechet_distance(moments(features), self.reference)}

    def held_out_each(self, videos: list[Tensor], prompts: list[str]) -> list[dict[str, float]]:
        """Return for each video whether color, shape, direction and all three match the caption, as
        1 or 0.
        """
        measured = measure(torch.stack(videos).cpu(), labels_of(prompts))
        names = ("color_correct", "shape_correct", "direction_correct", "all_correct")
        rows = torch.cat([measured.correct, measured.all_correct[:, None]], dim=1).tolist()
        return [dict(zip(names, row)) for row in rows]


class LearnedMiniatureScorer(MiniatureScorer):
    """Scorer that runs the miniature's reward model with VideoAlign's code; the true scores are
    held-out metrics.
    """

    def __init__(
        self, root: str | Path, *, device: str | torch.device = "cpu", batch_size: int = 32
    ):
        from hyvideo.rewards.videoalign import VideoAlignScorer

        super().__init__(root)
        folder = Path(root) / "VideoReward"
        self.scorer = VideoAlignScorer(
            folder, device=device, precision="fp32_math", batch_size=batch_size
        )
        self.dimensions = self.scorer.dimensions

    def score(
        self, videos: list[Tensor], prompts: list[str], *, fps: float
    ) -> list[dict[str, float]]:
        return self.scorer.score(videos, prompts, fps=fps)

    def score_with_gradient(self, videos: Tensor, prompts: list[str], *, fps: float) -> Tensor:
        return self.scorer.score_with_gradient(videos, prompts, fps=fps)

    def held_out_each(self, videos: list[Tensor], prompts: list[str]) -> list[dict[str, float]]:
        """Return the metrics of `MiniatureScorer` and the true scores."""
        truth = super().score(videos, prompts, fps=FPS)
        correct = super().held_out_each(videos, prompts)
        return [
            flags | {f"true/{name}": score for name, score in row.items()}
            for flags, row in zip(correct, truth)
        ]
