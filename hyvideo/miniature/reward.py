"""The miniature world's judge: what a clip truly shows, in the role of VideoAlign."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hyvideo.miniature.measures import features, frechet_distance, measure, moments
from hyvideo.miniature.world import labels_of

REFERENCE_STATISTICS = "reference_statistics.safetensors"


class MiniatureScorer:
    """VQ, MQ and TA in [0, 1] by analysis of the pixels; the Frechet distance to clean clips is held out.

    Args:
        root: The checkpoint folder. Without reference statistics there is no Frechet distance.
        device: Not used: the analysis runs on the CPU.
    """

    def __init__(self, root: str | Path, *, device: str | torch.device = "cpu"):
        path = Path(root) / REFERENCE_STATISTICS
        self.reference = None
        if path.is_file():
            statistics = load_file(path)
            self.reference = statistics["mean"], statistics["covariance"]

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[dict[str, float]]:
        shown = measure(torch.stack(videos).cpu(), labels_of(prompts))
        columns = (shown.visual_quality, shown.motion_quality, shown.text_alignment)
        return [dict(zip(("VQ", "MQ", "TA"), row)) for row in zip(*(column.tolist() for column in columns))]

    def check_prompts(self, prompts: list[str]) -> None:
        labels_of(prompts)

    def held_out(self, videos: list[Tensor], prompts: list[str]) -> dict[str, float]:
        """Share of clips whose colour, shape, direction are right, and the Frechet distance of the whole set."""
        clips = torch.stack(videos).cpu()
        shown = measure(clips, labels_of(prompts))
        result = {
            "color_correct": shown.color_correct.mean().item(),
            "shape_correct": shown.shape_correct.mean().item(),
            "direction_correct": shown.direction_correct.mean().item(),
            "all_correct": shown.all_correct.mean().item(),
        }
        if self.reference is not None and len(videos) > 1:
            result["frechet_distance"] = frechet_distance(moments(features(clips)), self.reference)
        return result


class LearnedMiniatureScorer:
    """The miniature's own reward model, through the code of VideoAlign; the measured truth is held out.

    Args:
        root: The checkpoint folder with the folder VideoReward in it.
    """

    def __init__(self, root: str | Path, *, device: str | torch.device = "cpu", batch_size: int = 32):
        from hyvideo.models.reward_models.videoalign import VideoAlignScorer

        folder = Path(root) / "VideoReward"
        self.scorer = VideoAlignScorer(folder, device=device, precision="fp32_math", batch_size=batch_size)
        self.truth = MiniatureScorer(root)

    def score(self, videos: list[Tensor], prompts: list[str], *, fps: float) -> list[dict[str, float]]:
        return self.scorer.score(videos, prompts, fps=fps)

    def check_prompts(self, prompts: list[str]) -> None:
        self.truth.check_prompts(prompts)

    def held_out(self, videos: list[Tensor], prompts: list[str]) -> dict[str, float]:
        """Those of `MiniatureScorer`, and the mean of each true score."""
        true = self.truth.score(videos, prompts, fps=0.0)
        means = {f"true/{name}": sum(scores[name] for scores in true) / len(true) for name in ("VQ", "MQ", "TA")}
        return self.truth.held_out(videos, prompts) | means
