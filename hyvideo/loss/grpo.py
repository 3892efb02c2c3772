"""GRPO loss with KL terms, as functions of tensors: no model, no ranks, no settings."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.loss.trust_region import KLWeights, position_kl, velocity_kl


@dataclass(frozen=True)
class LossInputs:
    """A batch of (rollout, step) pairs. Only ``log_prob`` and ``mean`` carry a gradient."""

    log_prob: Tensor  # (batch,), of the sampled transition under the current policy
    mean: Tensor  # (batch, channels, frames, height, width), under the current policy
    kl_std: Tensor  # (batch, 1, 1, 1, 1), of the transition in KL terms
    old_log_prob: Tensor  # (batch,), under the rollout policy
    advantages: Tensor  # (batch,), finite
    step_weights: Tensor  # (batch,), from the equalizer
    # like ``mean``; None if the position KL is exactly 0 or not computed
    anchor_mean: Tensor | None = None
    # factor of the position KL; a tensor has one per pair, (batch,)
    anchor_weight: Tensor | float = 1.0
    # like ``mean``, for the closed-form velocity KL; None: log-ratio
    rollout_mean: Tensor | None = None


@dataclass(frozen=True)
class LossTerms:
    """Loss terms of each pair, (batch,) each; the caller divides their sum by the number of pairs
    in the update.
    """

    loss: Tensor  # policy loss plus weighted KL, with gradient
    policy: Tensor  # clipped policy loss
    position: Tensor  # KL to the anchor
    velocity: Tensor  # KL to the rollout policy
    kl: Tensor  # weighted sum of position and velocity, without the coefficient
    ratio: Tensor  # likelihood under the policy divided by that under the rollout policy, detached
    is_clipped: Tensor  # whether the ratio is outside the clip range
    log_prob: Tensor  # under the policy


def grpo_terms(
    inputs: LossInputs, *, clip_range: float, kl_weights: KLWeights, kl_coefficient: float
) -> LossTerms:
    """Return ``L = L_pol + beta (w_pos KL_pos + w_vel KL_vel)`` of each pair.

    Source: arXiv:2603.21872, Section 3.2.
    """
    policy, ratio = clipped_policy_loss(
        inputs.log_prob,
        inputs.old_log_prob,
        inputs.advantages,
        inputs.step_weights,
        clip_range=clip_range,
    )
    if inputs.rollout_mean is None:
        velocity = velocity_kl(inputs.log_prob, inputs.old_log_prob)
    else:
        velocity = position_kl(inputs.mean, inputs.rollout_mean, inputs.kl_std)
    position = torch.zeros_like(velocity)
    if inputs.anchor_mean is not None:
        position = inputs.anchor_weight * position_kl(
            inputs.mean, inputs.anchor_mean, inputs.kl_std
        )
    kl = weighted_kl(position, velocity, kl_weights)
    return LossTerms(
        loss=policy + kl_coefficient * kl,
        policy=policy,
        position=position,
        velocity=velocity,
        kl=kl,
        ratio=ratio,
        is_clipped=(ratio - 1).abs() > clip_range,
        log_prob=inputs.log_prob,
    )


def weighted_kl(position: Tensor, velocity: Tensor, weights: KLWeights) -> Tensor:
    """Return ``w_pos KL_pos + w_vel KL_vel``. Shape of arguments and result: (batch,)."""
    return weights.position * position + weights.velocity * velocity


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    step_weights: Tensor,
    *,
    clip_range: float,
) -> tuple[Tensor, Tensor]:
    """Return ``S max(-A ratio, -A clamp(ratio, 1 - clip, 1 + clip))`` and the detached
    ``ratio = exp(log_prob - old)``.

    Only ``log_prob`` carries a gradient. Shape of arguments and results: (batch,). Source: PPO,
    arXiv:1707.06347.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clamped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return step_weights * torch.maximum(-advantages * ratio, -advantages * clamped), ratio.detach()
