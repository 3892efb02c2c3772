"""Velocity of the score network, whose noise grows as ``signal = exp(-time / 2)``."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from hyvideo.models.conditions import Condition
from hyvideo.models.noise_prediction import velocity_from_noise

FIRST_TIME = 1e-3  # the network is not trained below


def forwards(transformer: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
    """Yield the module whose forward pass this package replaces, and the new forward pass."""
    yield transformer, forward


def forward(
    self: nn.Module,
    latents: Tensor,
    timestep: Tensor,
    conditions: Sequence[Condition],
    ends: Tensor | None = None,
) -> Tensor:
    """Return the velocity, with the shape of ``latents``: (batch, 1, frames, height, width).

    ``conditions`` are empty, because the model knows no prompt, and ``ends`` is not used.
    """
    frames = latents.shape[2]

    def predict_noise(noisy: Tensor, signal: Tensor, noise_scale: Tensor) -> Tensor:
        times = (-2 * signal.log()).clamp(min=FIRST_TIME).repeat_interleave(frames)
        images = noisy.transpose(1, 2).flatten(0, 1)  # (batch x frames, 1, height, width)
        scores = self.score(images, times).unflatten(0, (-1, frames)).transpose(1, 2)
        return -noise_scale.view(-1, 1, 1, 1, 1) * scores

    return velocity_from_noise(predict_noise, latents, timestep)
