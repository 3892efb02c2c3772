"""VideoAlign as a frozen reward model."""

from hyvideo.models.reward_models.videoalign.scorer import VideoAlignScorer

__all__ = ["VideoAlignScorer"]
