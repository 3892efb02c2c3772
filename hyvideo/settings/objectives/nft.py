"""Settings of objective nft."""

from hyvideo.settings.objectives.base import RewardGradientSettings, TrustRegionSettings
from hyvideo.settings.sections import learning


class NFTSettings(RewardGradientSettings, TrustRegionSettings):
    """DiffusionNFT, a velocity loss on re-noised rollouts."""

    name = "nft"
    label = "DiffusionNFT"
    sentence = "DiffusionNFT, a velocity loss on re-noised rollouts"
    class_path = "hyvideo.training.objectives.nft:NFT"
    trains = "levels"
    needs_old_velocities = True
    checks_velocities = True

    nft_levels: int = learning(4, "Noise levels that are trained per rollout.", ge=1)
