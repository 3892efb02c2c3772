"""Velocity of a diffusion model that predicts the noise or a score, for a family's forward pass.

A variance-preserving diffusion model reads ``x = signal * data + noise_scale * noise``, with
``signal**2 + noise_scale**2 = 1``. Dividing by ``signal + noise_scale`` gives this project's latents
``(1 - sigma) * data + sigma * noise`` with ``sigma = noise_scale / (signal + noise_scale)``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Smallest signal at which a model is asked, see `velocity_from_noise`.
LEAST_SIGNAL = 0.05


def signal_and_noise(
    timestep: Tensor, *, least_signal: float = LEAST_SIGNAL
) -> tuple[Tensor, Tensor]:
    """Return the factors of data and noise at timesteps ``1000 * sigma``.

    The signal is at least ``least_signal``, and the squares sum to 1. Shape of each: (batch,).
    """
    sigma = timestep / 1000
    signal = (1 - sigma) / torch.hypot(sigma, 1 - sigma)
    signal = signal.clamp(min=least_signal)
    return signal, (1 - signal**2).sqrt()


def velocity_from_noise(
    predict_noise: Callable[[Tensor, Tensor, Tensor], Tensor],
    latents: Tensor,
    timestep: Tensor,
    *,
    least_signal: float = LEAST_SIGNAL,
) -> Tensor:
    """Return the velocity ``noise - data`` of a model that predicts the noise, in float32.

    The data follow from the noise as ``(x - noise_scale * noise) / signal``, so that an error of the
    model is divided by the signal, which is 0 at ``sigma = 1``, where sampling begins. The model is
    therefore asked at a signal of at least ``least_signal``, and an error grows by a factor of 20 at
    most.

    Args:
        predict_noise: Called with the noisy data ``x``, the signal and the noise scale, the latter
            two of shape (batch,). Returns the noise, with the shape of ``x``. A model that predicts
            the score of ``x`` returns ``-noise_scale * score``.
        latents: Noisy latents. Shape: (batch, channels, frames, height, width).
        timestep: ``1000 * sigma``. Shape: (batch,).
        least_signal: Smallest signal, between 0 and 1.
    """
    signal, noise_scale = signal_and_noise(timestep, least_signal=least_signal)
    of_data = signal.view(-1, 1, 1, 1, 1)
    of_noise = noise_scale.view(-1, 1, 1, 1, 1)
    noisy = (of_data + of_noise) * latents.float()
    noise = predict_noise(noisy, signal, noise_scale).float()
    data = (noisy - of_noise * noise) / of_data
    return noise - data
