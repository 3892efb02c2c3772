"""VideoAlign as the frozen reward."""

from hyvideo.models.reward_models.videoalign.scorer import VideoAlignScorer

__all__ = ["VideoAlignScorer"]
