"""HPSv3 as a frozen reward model."""

from hyvideo.rewards.hpsv3.scorer import HPSv3Scorer

__all__ = ["HPSv3Scorer"]
