"""Settings of objective draft."""

from typing import Literal

from hyvideo.settings.objectives.base import RewardGradientSettings, TrustRegionSettings
from hyvideo.settings.sections import learning


class DraftSettings(RewardGradientSettings, TrustRegionSettings):
    """Reward gradients alone."""

    name = "draft"
    label = "reward gradients"
    sentence = "reward gradients"
    class_path = "hyvideo.training.objectives.draft:Draft"
    trains = "levels"
    needs_velocities = True

    reward_gradient_weight: float = learning(
        0.05, "Weight of the reward's gradient through scorer and VAE.", gt=0
    )
    nft_levels: int = learning(
        4, "Noise levels at which the KL is measured; 0: at the reward step.", ge=0
    )
    kl_strategy: Literal["none", "fixed", "moving"] = learning(
        "moving", "KL terms: to the base model (fixed), or a moving anchor."
    )

    def derived(self) -> dict[str, object]:
        """Without a KL, no levels are needed at which it is measured."""
        found = super().derived()
        return found | {"nft_levels": 0} if self.strategy == "none" else found
