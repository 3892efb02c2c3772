"""Velocity of a flow map, as functions of tensors.

A flow map u(x, s, r) is the mean velocity of the sampling path from noise level s to level r <= s,
so that one step of any length is ``x_r = x_s - (s - r) u(x_s, s, r)``. The identity of MeanFlow
(Geng et al. 2025, arXiv:2505.13447) gives the velocity at x_s itself,

    v(x_s, s) = u(x_s, s, r) + (s - r) du/ds

with the total derivative along the path. Trained on re-noised rollouts, v has the target ``e - x0``
and u the target ``e - x0 - (s - r) du/ds``, as in MeanFlowNFT (arXiv:2607.15273).
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Distance in noise level of the central difference. A shorter one follows the fast waves of the time
# embedding, whose shortest period is 2 pi / 1000, and magnifies rounding: on the miniature in bf16,
# the error of the derivative term is 0.6 of the velocity at 0.005, and 0.15 at 0.02.
DIFFERENCE = 0.02


@torch.no_grad()
def derivative_term(
    mean_velocity: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    tangent: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    difference: float = DIFFERENCE,
) -> Tensor:
    """Return ``(s - r) du/ds`` by a central difference, without gradient.

    Args:
        mean_velocity: (latents, starts) -> u, with fixed ends.
        latents: x_s. Shape: (batch, ...).
        tangent: dx/ds, of a re-noised rollout e - x0. Shape: as ``latents``.
        starts: s, at least ``difference`` away from 0 and 1. Shape: (batch,).
        ends: r. Shape: (batch,).
        difference: h, the distance in noise level; the error is of the order h^2.
    """

    def at(distance: float) -> Tensor:
        return mean_velocity(latents + distance * tangent, starts + distance)

    derivative = (at(difference) - at(-difference)) / (2 * difference)
    lengths = (starts - ends).to(latents.device)
    return lengths.view(-1, *(1,) * (latents.dim() - 1)) * derivative
