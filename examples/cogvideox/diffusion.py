"""A diffusion model with v-prediction as a velocity model.

CogVideoX reads ``x = a * data + b * noise`` with ``a**2 + b**2 = 1`` at one of 1000 times, and
predicts ``v = a * noise - b * data``. This project's latents are ``(1 - sigma) * data + sigma *
noise``. With ``sigma = b / (a + b)`` they are ``x / (a + b)``, so that a time of the diffusion is a
noise level, and a linear function of input and prediction is the velocity ``noise - data``. One
step of the ODE by Euler's method is then a step of DDIM.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

NUM_TIMES = 1000
SNR_SHIFT = 3.0  # `snr_shift_scale` of CogVideoX-2B's scheduler
_PARTS = 64  # of the distance between two times
_BETAS = (0.00085, 0.012)


class Diffusion(NamedTuple):
    """Noise levels of a batch."""

    sigma: Tensor  # float32; shape: (batch, 1, 1, 1, 1)

    @property
    def _length(self) -> Tensor:
        """Return ``1 / (a + b)``."""
        return torch.hypot(self.sigma, 1 - self.sigma)

    def inputs(self, latents: Tensor) -> Tensor:
        """Return ``x``, the input of the diffusion model, for latents of this project."""
        return latents / self._length

    def velocity(self, latents: Tensor, prediction: Tensor) -> Tensor:
        """Return ``noise - data`` for the diffusion model's prediction ``v``, in float32."""
        difference = (2 * self.sigma - 1) * self.inputs(latents)  # (b - a) / (b + a) * x
        return (difference + prediction.float()) / self._length

    @property
    def times(self) -> Tensor:
        """Return the times of the diffusion, linearly interpolated between whole numbers.

        The rounding to 1/64 makes the times of the training exact, although sigma is float32.
        Levels below the smallest one of the training, 0.048, have the time 0. Shape: (batch,).
        """
        levels = _levels_on(self.sigma.device)
        sigma = self.sigma.flatten().double()
        after = torch.searchsorted(levels, sigma).clamp(1, NUM_TIMES - 1)
        low, high = levels[after - 1], levels[after]
        times = after - 1 + ((sigma - low) / (high - low)).clamp(0, 1)
        return ((times * _PARTS).round() / _PARTS).float()


@functools.cache
def levels() -> Tensor:
    """Return the noise level of each time, ascending, in float64. Shape: (1000,).

    The squares of ``a`` are cumulated from the betas, then their signal-to-noise ratio is divided by
    `SNR_SHIFT`, then ``a`` is rescaled so that the last level is noise alone.
    """
    first, last = (beta**0.5 for beta in _BETAS)
    betas = torch.linspace(first, last, NUM_TIMES, dtype=torch.float64, device="cpu") ** 2
    squares = (1 - betas).cumprod(0)
    signal = (squares / (SNR_SHIFT + (1 - SNR_SHIFT) * squares)).sqrt()
    signal = (signal - signal[-1]) * (signal[0] / (signal[0] - signal[-1]))
    noise = (1 - signal**2).sqrt()
    return noise / (signal + noise)


@functools.cache
def _levels_on(device: torch.device) -> Tensor:
    return levels().to(device)
