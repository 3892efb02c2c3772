"""The loss of GRPO in its trust region: tensors in, terms out. It knows no model, no rank and no setting."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.grpo.trust_region import KLWeights, position_kl, velocity_kl


@dataclass(frozen=True)
class LossInputs:
    """A batch of (rollout, step) pairs; what carries the gradient is ``log_prob`` and ``mean``."""

    log_prob: Tensor  # (batch,), of the drawn transition under the policy as it is now
    mean: Tensor  # (batch, channels, frames, height, width), of that transition
    std: Tensor  # (batch, 1, 1, 1, 1)
    old_log_prob: Tensor  # (batch,), under the policy that drew it
    advantages: Tensor  # (batch,), finite
    step_weights: Tensor  # (batch,), of the equalizer
    anchor_mean: Tensor | None = None  # as ``mean``; None where the position distance is not measured or exactly 0
    anchor_weight: float = 1.0  # of the position distance: 1 over the part of the pairs at which it is measured
    rollout_mean: Tensor | None = None  # as ``mean``, for the closed form of the velocity distance; None: log-ratio


@dataclass(frozen=True)
class LossTerms:
    """Terms of each pair, (batch,) each; the caller divides their sum by the number of terms of the update."""

    loss: Tensor  # with gradient
    policy: Tensor
    position: Tensor
    velocity: Tensor
    kl: Tensor
    ratio: Tensor
    is_clipped: Tensor  # where the ratio is outside the clip range
    log_prob: Tensor

    # The field of each sum, by its name in the metrics.
    SUMMED = {
        "loss/policy": "policy",
        "loss/total": "loss",
        "kl/position": "position",
        "kl/velocity": "velocity",
        "kl/total": "kl",
        "policy/ratio_mean": "ratio",
        "policy/clip_fraction": "is_clipped",
        "policy/log_prob": "log_prob",
    }

    def sums(self) -> Tensor:
        """Sums over the batch in the order of ``SUMMED``, float64, without gradient. Shape: (8,)."""
        return torch.stack([getattr(self, field).detach().double().sum() for field in self.SUMMED.values()])

    def largest_deviation(self) -> Tensor:
        """Largest ``|ratio - 1|``. Shape: ()."""
        return (self.ratio - 1).abs().amax()


def grpo_terms(inputs: LossInputs, *, clip_range: float, kl_weights: KLWeights, kl_coefficient: float) -> LossTerms:
    """``L = L_pol + beta (w_pos KL_pos + w_vel KL_vel)`` of each pair. Source: method.md, 6 to 8."""
    policy, ratio = clipped_policy_loss(
        inputs.log_prob, inputs.old_log_prob, inputs.advantages, inputs.step_weights, clip_range=clip_range
    )
    if inputs.rollout_mean is None:
        velocity = velocity_kl(inputs.log_prob, inputs.old_log_prob)
    else:
        velocity = position_kl(inputs.mean, inputs.rollout_mean, inputs.std)
    position = torch.zeros_like(velocity)
    if inputs.anchor_mean is not None:
        position = inputs.anchor_weight * position_kl(inputs.mean, inputs.anchor_mean, inputs.std)
    return LossTerms(
        **in_trust_region(policy, position, velocity, kl_weights, kl_coefficient),
        ratio=ratio,
        is_clipped=(ratio - 1).abs() > clip_range,
        log_prob=inputs.log_prob,
    )


def in_trust_region(
    policy: Tensor, position: Tensor, velocity: Tensor, weights: KLWeights, coefficient: float
) -> dict[str, Tensor]:
    """The loss and its parts, by their names in `LossTerms`. Shape of each: (batch,)."""
    kl = weights.position * position + weights.velocity * velocity
    loss = policy + coefficient * kl
    return {"loss": loss, "policy": policy, "position": position, "velocity": velocity, "kl": kl}


def clipped_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, step_weights: Tensor, *, clip_range: float
) -> tuple[Tensor, Tensor]:
    """``S max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip))``, and the detached ``ratio = exp(log_prob - old)``.

    Every argument and result has shape (batch,); ``log_prob`` carries the gradient. Source: method.md, 6.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clamped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return step_weights * torch.maximum(-advantages * ratio, -advantages * clamped), ratio.detach()
