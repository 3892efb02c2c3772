"""Diffusion-DPO for velocities: preferences between pairs of videos, as functions of tensors.

Both videos of a pair, the winner w and the loser l, are re-noised to the same level s with the same
noise e, so that ``x_s = (1 - s) x0 + s e`` has the target velocity ``e - x0``. With the policy's
velocity v and the base model's v_ref,

    E = |v - (e - x0)|^2        E_ref = |v_ref - (e - x0)|^2        D = E - E_ref
    z = -(beta / 2) (D_w - D_l)                                     loss = -log sigmoid(z)

so that the gradient is ``+ (beta / 2) sigmoid(-z)`` with respect to E_w, and minus that with
respect to E_l. The equation only compares the two errors: both may grow, the winner's too
("displacement", D_w > 0). The KL to the base model, ``|v - v_ref|^2``, prevents this. Source:
Wallace et al. 2023, "Diffusion-DPO", arXiv:2311.12908.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hyvideo.loss.nft import mean_square


@dataclass(frozen=True)
class DPOInputs:
    """Re-noised videos of whole pairs: winner, loser, winner, loser.

    Only ``velocity`` carries a gradient.
    """

    velocity: Tensor  # (2 pairs, channels, frames, height, width)
    anchor_velocity: Tensor  # like ``velocity``, from the base model
    target: Tensor  # like ``velocity``: noise - video
    weights: Tensor  # (2 pairs,), of the pair of each video


@dataclass(frozen=True)
class DPOTerms:
    """Loss terms of each video; the caller divides their sum by the number of videos in the update.

    Shape of each: (videos,).
    """

    # weighted loss of the video's pair, plus the KL times its coefficient, with gradient
    loss: Tensor
    policy: Tensor  # weighted loss of the video's pair
    kl: Tensor  # mean squared velocity difference to the base model, without the coefficient
    # 1 if the policy prefers the winner more than the base model does, 0.5 if equally, else 0
    accuracy: Tensor
    displacement: Tensor  # D_w of the video's pair
    margin: Tensor  # z of the video's pair
    # |D_w - D_l| / (E_ref_w + E_ref_l) of the video's pair; 0 while the policy equals the base model
    contrast: Tensor
    deviation: Tensor  # |D| / E_ref of the video; 0 while the policy equals the base model


def dpo_terms(inputs: DPOInputs, *, beta: float, kl_coefficient: float) -> DPOTerms:
    """Return the loss of whole pairs, which need the graphs of both videos."""
    error = mean_square(inputs.velocity - inputs.target)
    anchor_error = mean_square(inputs.anchor_velocity - inputs.target)
    change = (error - anchor_error).view(-1, 2)
    margin = -beta / 2 * (change[:, 0] - change[:, 1])
    policy = inputs.weights * _for_both(-F.logsigmoid(margin))
    kl = mean_square(inputs.velocity - inputs.anchor_velocity)
    return DPOTerms(
        loss=policy + kl_coefficient * kl,
        policy=policy,
        kl=kl,
        accuracy=_for_both(accuracy_of(margin)),
        displacement=_for_both(change[:, 0].detach()),
        margin=_for_both(margin.detach()),
        contrast=_for_both(_contrast(change.detach(), anchor_error.view(-1, 2))),
        deviation=change.detach().flatten().abs() / anchor_error,
    )


def dpo_terms_of_videos(
    inputs: DPOInputs,
    # (videos, 2), the errors E of winner and loser of each video's pair, without a gradient
    pair_errors: Tensor,
    pair_anchor_errors: Tensor,  # like ``pair_errors``, of the base model
    is_winner: Tensor,  # (videos,)
    *,
    beta: float,
    kl_coefficient: float,
) -> DPOTerms:
    """Return the loss of single videos; its values, and its gradient over both videos of a pair,
    equal `dpo_terms`.

    Only the graphs of these videos are needed. The errors of the other videos must be those of the
    same weights.
    """
    change = pair_errors - pair_anchor_errors
    margin = -beta / 2 * (change[:, 0] - change[:, 1])
    error = mean_square(inputs.velocity - inputs.target)
    value = inputs.weights * -F.logsigmoid(margin)
    # The derivative of the loss with respect to the error, twice, because `dpo_terms` counts a pair
    # for both videos.
    slope = beta * inputs.weights * torch.sigmoid(-margin) * torch.where(is_winner, 1.0, -1.0)
    policy = value + slope * (error - error.detach())
    kl = mean_square(inputs.velocity - inputs.anchor_velocity)
    anchor_error = torch.where(is_winner, pair_anchor_errors[:, 0], pair_anchor_errors[:, 1])
    own = torch.where(is_winner, change[:, 0], change[:, 1])
    return DPOTerms(
        loss=policy + kl_coefficient * kl,
        policy=policy,
        kl=kl,
        accuracy=accuracy_of(margin),
        displacement=change[:, 0],
        margin=margin,
        contrast=_contrast(change, pair_anchor_errors),
        deviation=own.abs() / anchor_error,
    )


def accuracy_of(margin: Tensor) -> Tensor:
    """Return 1 for positive margins, 0.5 for 0 and 0 for negative ones.

    Shape: as ``margin``.
    """
    return (margin.detach().sign() + 1) / 2


def _contrast(change: Tensor, anchor_error: Tensor) -> Tensor:
    """Return `DPOTerms.contrast` of pairs. Shape: (pairs, 2) each, to (pairs,)."""
    return (change[:, 0] - change[:, 1]).abs() / anchor_error.sum(1)


def _for_both(values: Tensor) -> Tensor:
    """Repeat the value of each pair for both of its videos. Shape: (pairs,) to (2 pairs,)."""
    return values.repeat_interleave(2)
