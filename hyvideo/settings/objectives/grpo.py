"""Settings of objective grpo."""

from typing import Literal

from hyvideo.settings.objectives.base import TrainedStepsSettings, TrustRegionSettings
from hyvideo.settings.sections import RolloutSettings, learning


class GRPOSettings(TrainedStepsSettings, TrustRegionSettings):
    """Clipped likelihood ratios of the sampled steps."""

    name = "grpo"
    label = "GRPO"
    sentence = "clipped ratios"
    class_path = "hyvideo.training.objectives.grpo:GRPO"
    trains = "steps"
    has_ratio = True

    clip_range: float = learning(1e-4, "Clip ratios to 1 plus or minus this value.", gt=0)
    use_grad_balancing: bool = learning(True, "Use the temporal gradient equalizer.")
    sde_window: str = learning(
        "", "SDE window: fixed:START:LENGTH, random:LENGTH or sliding:LENGTH[:STRIDE]."
    )
    kl_velocity: Literal["log_ratio", "gaussian"] = learning(
        "log_ratio", "Velocity KL: the mean log-ratio, or the closed form for two Gaussians."
    )

    def batches_of_warmup(self, rollout: RolloutSettings) -> float:
        """Return the (rollout, step) pairs of a replica in an update, which the public reference
        counts.
        """
        if not rollout.reference_conventions:
            return 1.0
        steps = rollout.grpo_sampling_steps * self.timestep_fraction / self.updates
        return steps * (rollout.batch_size * rollout.gradient_accumulation_steps)
