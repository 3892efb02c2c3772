"""DiffusionNFT: reinforcement learning on the forward process. Tensors in, terms out.

A rollout x0 is noised anew, ``x_s = (1 - s) x0 + s e``, where the velocity of the flow is ``e - x0``. With the
advantage A, ``r = (1 + A / clip) / 2``, the policy's velocity v and that of the policy of the rollouts v_old,

    loss = r |v - target|^2 + (1 - r) |(2 v_old - v) - target|^2

draws v towards what good rollouts show, and away from what bad ones show: its gradient at v = v_old is
``2 (2 r - 1) (v - target)``. Source: Zheng et al. 2025, "DiffusionNFT", with beta 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.grpo.loss import LossTerms, in_trust_region
from hyvideo.grpo.trust_region import KLWeights


@dataclass(frozen=True)
class NFTInputs:
    """A batch of (rollout, noise level) pairs; what carries the gradient is ``velocity``."""

    velocity: Tensor  # (batch, channels, frames, height, width), guided as in sampling
    old_velocity: Tensor  # as ``velocity``, of the policy that made the rollouts
    target: Tensor  # as ``velocity``: noise less the rollout
    advantages: Tensor  # (batch,), finite, within plus and minus the clip
    anchor_velocity: Tensor | None = None  # as ``velocity``; None where its distance is not measured
    anchor_weight: float = 1.0  # of that distance: 1 over the part of the pairs at which it is measured


def nft_terms(inputs: NFTInputs, *, advantage_clip: float, kl_weights: KLWeights, kl_coefficient: float) -> LossTerms:
    """The loss of each pair, and the trust region's distances: mean squares of differences of velocities.

    ``ratio`` is 1 plus the distance to the old policy in units of its error, and 1 before the first update;
    ``is_clipped`` counts advantages at the clip, and ``log_prob`` is the error with a minus.
    """
    weight = (1 + (inputs.advantages / advantage_clip).clamp(-1, 1)) / 2
    error = mean_square(inputs.velocity - inputs.target)
    mirrored = mean_square(2 * inputs.old_velocity - inputs.velocity - inputs.target)
    policy = weight * error + (1 - weight) * mirrored
    velocity = mean_square(inputs.velocity - inputs.old_velocity)
    position = torch.zeros_like(velocity)
    if inputs.anchor_velocity is not None:
        position = inputs.anchor_weight * mean_square(inputs.velocity - inputs.anchor_velocity)
    moved = (velocity / mean_square(inputs.old_velocity - inputs.target)).sqrt().detach()
    return LossTerms(
        **in_trust_region(policy, position, velocity, kl_weights, kl_coefficient),
        ratio=1 + moved,
        is_clipped=inputs.advantages.abs() >= advantage_clip,
        log_prob=-error,
    )


def mean_square(values: Tensor) -> Tensor:
    """Mean of the squares of each sample. Shape: (batch, ...) to (batch,)."""
    return values.square().flatten(1).mean(1)
