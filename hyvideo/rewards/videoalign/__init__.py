"""VideoAlign as a frozen reward model."""

from hyvideo.rewards.videoalign.scorer import VideoAlignScorer

__all__ = ["VideoAlignScorer"]
