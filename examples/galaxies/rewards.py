"""Rewards of lensed quasars: how many images of the quasar there are, and how real they look.

Gravity of a galaxy in front of a quasar bends its light, so that we see several images of it. Four
images in a cross are called an Einstein cross.
"""

from pathlib import Path

import torch
from torch import Tensor

from examples.galaxies.network import GalaxyScoreNet
from examples.galaxies.pixels import GalaxyPixels
from hyvideo.rewards.rewards import Scorer

LEAST_BRIGHTNESS = 0.12  # of an image of the quasar, of 1
CROSS = 4
TIMES = (0.05, 0.2, 0.7, 2.0)  # noise levels of `Realism`


class Lenses(Scorer):
    """``cross`` is 1 for exactly four images of the quasar, and falls by 0.25 with each missing or
    surplus image, to at least 0; ``images`` is their number.
    """

    dimensions = ("cross", "images")

    def score(self, videos, prompts, *, fps):
        counts = number_of_images(brightness(videos)).tolist()
        return [
            {"cross": max(0.0, 1 - abs(count - CROSS) / CROSS), "images": float(count)}
            for count in counts
        ]


class Realism(Scorer):
    """How well the pretrained network denoises an image, with the same noise for all images: -10
    times the mean squared error of the noise. The training does not see it.
    """

    dimensions = ("realism",)

    def __init__(self, root: str):  # the run passes its pretrained_model_root
        self.network = GalaxyScoreNet.from_pretrained(Path(root) / "transformer").eval()
        self.peak = GalaxyPixels.load_config(Path(root) / "vae")["peak"]

    @torch.no_grad()
    def score(self, videos, prompts, *, fps):
        images = self.peak * brightness(videos)[:, None]
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(len(TIMES), *images.shape[1:], generator=generator)
        # one by one, so that no score depends on the other images
        return [{"realism": -10 * self._error(image[None], noise)} for image in images]

    def _error(self, image: Tensor, noise: Tensor) -> float:
        """Return the mean squared error of the predicted noise of an image (1, 1, height, width)."""
        times = torch.tensor(TIMES)
        signal = torch.exp(-times / 2).view(-1, 1, 1, 1)
        noise_scale = (1 - signal**2).sqrt()
        score = self.network.score(signal * image + noise_scale * noise, times)
        return (noise_scale * score + noise).square().mean().item()


def brightness(videos: list[Tensor]) -> Tensor:
    """Return the first frames as gray images between 0 and 1. Shape: (videos, height, width)."""
    return torch.stack([video[0, 0].float() / 255 for video in videos])


def number_of_images(images: Tensor) -> Tensor:
    """Return the number of bright local maxima of the blurred images.

    Shape: (images, height, width) to (images,).
    """
    offsets = torch.arange(-3.0, 4.0)
    weights = torch.exp(-(offsets**2) / (2 * 1.2**2))
    kernel = torch.outer(weights, weights) / weights.sum() ** 2
    blurred = torch.nn.functional.conv2d(images[:, None], kernel[None, None], padding=3)
    highest = torch.nn.functional.max_pool2d(blurred, 5, stride=1, padding=2)
    return ((blurred == highest) & (blurred > LEAST_BRIGHTNESS)).sum((1, 2, 3))
