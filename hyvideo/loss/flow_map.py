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
# The term grows with the length of the interval, and so does its noise from rounding. For longer
# intervals than this, a longer distance halves the variance of this noise.
LONG_INTERVAL, LONG_DIFFERENCE = 0.3, 0.03


def differences(starts: Tensor, ends: Tensor) -> Tensor:
    """Return the distance in noise level of the central difference for each interval, at most as
    far as noise levels 0 and 1.

    Starts of intervals with a length must be `DIFFERENCE` away from 0 and 1. Shape: (batch,).
    """
    longer = (1 - starts).clamp(DIFFERENCE, LONG_DIFFERENCE)
    steps = torch.where(starts - ends > LONG_INTERVAL, longer, DIFFERENCE)
    # Without a length, the term is 0, and any distance above 0 gives it.
    room = torch.minimum(starts, 1 - starts).clamp(max=DIFFERENCE)
    return torch.where(starts == ends, room, steps)


@torch.no_grad()
def derivative_term(
    mean_velocity: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    tangent: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    difference: float | None = None,
) -> Tensor:
    """Return ``(s - r) du/ds`` by a central difference, without gradient.

    Args:
        mean_velocity: (latents, starts) -> u, with fixed ends.
        latents: x_s. Shape: (batch, ...).
        tangent: dx/ds, of a re-noised rollout e - x0. Shape: as ``latents``.
        starts: s, at least h away from 0 and 1, and between them where r = s. Shape: (batch,).
        ends: r. Shape: (batch,).
        difference: h, the distance in noise level, by default that of `differences`; the error is
            of the order h^2.
    """
    if difference is None:
        steps = differences(starts, ends)
    else:
        steps = torch.full_like(starts, difference)

    def column(values: Tensor) -> Tensor:
        return values.to(latents.device).view(-1, *(1,) * (latents.dim() - 1))

    def at(distances: Tensor) -> Tensor:
        return mean_velocity(latents + column(distances) * tangent, starts + distances)

    derivative = (at(steps) - at(-steps)) / (2 * column(steps))
    return column(starts - ends) * derivative
