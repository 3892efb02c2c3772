"""DiffusionNFT loss: reinforcement learning on the forward process, as functions of tensors.

A rollout x0 is re-noised to ``x_s = (1 - s) x0 + s e`` with noise e, so that the target velocity is
``e - x0``. With advantage A, ``r = (1 + A / clip) / 2``, the policy's velocity v and the rollout
policy's velocity v_old,

    loss = r |v - target|^2 + (1 - r) |(2 v_old - v) - target|^2

moves v towards the target of good rollouts and away from the target of bad ones: the gradient at v =
v_old is ``2 (2 r - 1) (v - target)``. A rollout with advantage 0 has no gradient there; later, it
would only pull v back to v_old, and is left out. While v = v_old, the loss is advantage-weighted
regression; `NFTTerms.contrast` shows how far it has left that. Source: Zheng et al. 2025, "DiffusionNFT",
arXiv:2509.16117, with beta 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.loss.grpo import weighted_kl
from hyvideo.loss.trust_region import KLWeights


@dataclass(frozen=True)
class NFTInputs:
    """A batch of (rollout, noise level) pairs. Only ``velocity`` carries a gradient."""

    velocity: Tensor  # (batch, channels, frames, height, width), guided as in sampling
    old_velocity: Tensor  # like ``velocity``, from the rollout policy
    target: Tensor  # like ``velocity``: noise - rollout
    advantages: Tensor  # (batch,), finite, within [-clip, clip]
    # like ``velocity``; None if the position KL is not computed
    anchor_velocity: Tensor | None = None
    anchor_weight: float = 1.0  # 1 / fraction of the pairs whose position KL is computed


@dataclass(frozen=True)
class NFTTerms:
    """Loss terms of each pair, (batch,) each; the caller divides their sum by the number of pairs
    in the update.
    """

    loss: Tensor  # policy loss plus weighted KL, with gradient
    policy: Tensor  # DiffusionNFT loss
    position: Tensor  # mean squared velocity difference to the anchor
    velocity: Tensor  # mean squared velocity difference to the rollout policy
    kl: Tensor  # weighted sum of position and velocity, without the coefficient
    error: Tensor  # mean squared velocity error |v - target|^2
    # sqrt(|v - v_old|^2 / |v_old - target|^2), detached; 0 before the first update
    distance: Tensor
    # share in [0, 1] of the gradient that the old velocity adds to advantage-weighted regression:
    # c / (c + a) with c = 2 (1 - r) |v - v_old| and a = |2 r - 1| |v - target|; detached
    contrast: Tensor
    is_clipped: Tensor  # whether the advantage is at the clip


def nft_terms(
    inputs: NFTInputs,
    *,
    advantage_clip: float,
    kl_weights: KLWeights,
    kl_coefficient: float,
    # False: advantages are 0 on purpose, and their policy loss keeps its gradient
    has_rewards: bool = True,
) -> NFTTerms:
    """Return the loss of each pair, with mean squared velocity differences in place of the KL
    terms.
    """
    weight = (1 + (inputs.advantages / advantage_clip).clamp(-1, 1)) / 2
    error = mean_square(inputs.velocity - inputs.target)
    mirrored = mean_square(2 * inputs.old_velocity - inputs.velocity - inputs.target)
    policy = weight * error + (1 - weight) * mirrored
    if has_rewards:
        policy = torch.where(inputs.advantages == 0, policy.detach(), policy)
    velocity = mean_square(inputs.velocity - inputs.old_velocity)
    position = torch.zeros_like(velocity)
    if inputs.anchor_velocity is not None:
        position = inputs.anchor_weight * mean_square(inputs.velocity - inputs.anchor_velocity)
    distance = (velocity / mean_square(inputs.old_velocity - inputs.target)).sqrt().detach()
    # The gradient is 2 (2 r - 1) (v - target) + 4 (1 - r) (v - v_old).
    pulled = 2 * (1 - weight) * velocity.detach().sqrt()
    regressed = (2 * weight - 1).abs() * error.detach().sqrt()
    contrast = pulled / (pulled + regressed).clamp(min=torch.finfo(pulled.dtype).tiny)
    if has_rewards:
        contrast = torch.where(inputs.advantages == 0, 0.0, contrast)
    kl = weighted_kl(position, velocity, kl_weights)
    return NFTTerms(
        loss=policy + kl_coefficient * kl,
        policy=policy,
        position=position,
        velocity=velocity,
        kl=kl,
        error=error,
        distance=distance,
        contrast=contrast,
        is_clipped=inputs.advantages.abs() >= advantage_clip,
    )


def mean_square(values: Tensor) -> Tensor:
    """Return the mean square of each sample. Shape: (batch, ...) to (batch,)."""
    return values.square().flatten(1).mean(1)


def relative_norm(velocity: Tensor, anchor: Tensor) -> Tensor:
    """Return the norm of each sample's velocity divided by the norm of the anchor's, without
    gradient. Shape: (batch,).

    Losses that push velocities away from bad samples tend to inflate it (NormGuard,
    arXiv:2606.27771).
    """
    return (mean_square(velocity.detach()) / mean_square(anchor)).sqrt()
