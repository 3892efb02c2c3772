"""The true reward's dimensions in the miniature: VQ, MQ and TA, computed from the pixels as
VideoAlign's counterparts.

They are smooth functions in [0, 1] of the saturated pixels. Clean videos score about 0.81, 0.99 and
0.98.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyvideo.data.randomness import normal
from hyvideo.miniature.world import HEADINGS, PALETTE, pixel_grid, signed_distances

EPSILON = 1e-3


@dataclass(frozen=True)
class Measures:
    """Scores of a batch of videos, given their captions."""

    # VQ: a crisp shape on a clean background. MQ: a straight path at constant size and sufficient
    # speed. TA: mean probability of the caption's color, shape and direction.
    scores: Tensor  # (batch, 3)
    # 1.0 where the most likely color, shape or direction matches the caption (batch, 3)
    correct: Tensor

    @property
    def all_correct(self) -> Tensor:
        return self.correct.prod(1)


@dataclass(frozen=True)
class _Object:
    """The saturated object in each frame of a video."""

    cover: Tensor  # (batch, frames, height, width), in [0, 1]
    area: Tensor  # (batch, frames), pixels
    path: Tensor  # x and y of its center (batch, frames, 2), pixels
    visible: Tensor  # (batch,), in [0, 1]


def measure(videos: Tensor, labels: Tensor) -> Measures:
    """Return the scores of videos (batch, frames, 3, height, width), given their captions' labels
    (batch, 3).

    Videos are uint8, or floats in [0, 255], by which the scores have a gradient.
    """
    pixels = videos.float() / 255
    obj = _find_object(pixels)
    shape_overlap, templates = _shape_overlap(obj)
    velocity, wobble = _motion(obj)

    color_probability = _color_probability(pixels, obj)
    shape_probability = torch.softmax(shape_overlap / 0.03, dim=1)
    direction_probability = torch.softmax(velocity @ HEADINGS.T / 2.0, dim=1)
    probabilities = (color_probability, shape_probability, direction_probability)
    index = torch.arange(len(labels))

    crispness = ((shape_overlap.amax(1) - 0.5) / 0.4).clamp(0, 1)
    cleanness = torch.exp(-_background_spread(pixels, templates) / 0.04)
    steadiness = torch.exp(-wobble / 0.8)
    area_change = obj.area.std(1) / (obj.area.mean(1) + EPSILON)
    speed = (velocity.norm(dim=1) / 9).clamp(0, 1)
    alignment = torch.stack(
        [probability[index, labels[:, k]] for k, probability in enumerate(probabilities)]
    ).mean(0)
    is_correct = [
        probability.argmax(1) == labels[:, k] for k, probability in enumerate(probabilities)
    ]
    correct = [(each & (obj.visible > 0.5)).float() for each in is_correct]
    visual_quality = obj.visible * (crispness + cleanness) / 2
    motion_quality = obj.visible * (steadiness + torch.exp(-area_change / 0.25) + speed) / 3
    scores = torch.stack([visual_quality, motion_quality, obj.visible * alignment], dim=1)
    return Measures(scores, torch.stack(correct, dim=1))


def _find_object(pixels: Tensor) -> _Object:  # (batch, frames, 3, height, width), in [0, 1]
    saturation = pixels.amax(2) - pixels.amin(2)
    cover = ((saturation - 0.2) / 0.35).clamp(0, 1)
    area = cover.sum((2, 3))
    center = [
        (cover * axis).sum((2, 3)) / (area + EPSILON) for axis in pixel_grid(*cover.shape[-2:])
    ]
    return _Object(cover, area, torch.stack(center, dim=-1), torch.sigmoid((area - 20) / 5).mean(1))


def _shape_overlap(obj: _Object) -> tuple[Tensor, Tensor]:
    """Return the soft IoU with each shape of equal area and center (batch, shapes), and the shapes'
    templates.
    """
    x, y = pixel_grid(*obj.cover.shape[-2:])
    dx, dy = x - obj.path[..., 0, None, None], y - obj.path[..., 1, None, None]
    radius = (obj.area / math.pi).clamp(min=1.0).sqrt()[..., None, None]
    templates = torch.sigmoid(-signed_distances(dx, dy, radius) / 0.5)
    intersection = torch.minimum(obj.cover, templates).sum((3, 4))
    union = torch.maximum(obj.cover, templates).sum((3, 4))
    return (intersection / (union + EPSILON)).mean(2).T, templates


def _motion(obj: _Object) -> tuple[Tensor, Tensor]:
    """Return the displacement by a line fit (batch, 2) and the RMS distance from the line (batch,),
    in pixels.
    """
    time = torch.linspace(-0.5, 0.5, obj.area.shape[1])
    velocity = (obj.path * time[:, None]).sum(1) / (time**2).sum()
    residual = obj.path - obj.path.mean(1, keepdim=True) - velocity[:, None] * time[:, None]
    return velocity, (residual**2).sum(-1).mean(1).sqrt()


def _color_probability(pixels: Tensor, obj: _Object) -> Tensor:
    """Return the probability of each palette color for the object. Shape: (batch, colors)."""
    weighted = (pixels * obj.cover[:, :, None]).sum((1, 3, 4))
    color = weighted / (obj.cover.sum((1, 2, 3))[:, None] + EPSILON)
    return torch.softmax(-((color[:, None] - PALETTE) ** 2).sum(-1) / 0.06, dim=1)


def _background_spread(pixels: Tensor, templates: Tensor) -> Tensor:
    """Return the standard deviation of the pixels outside all templates of the object.

    Shape: (batch,).
    """
    # (batch, frames, 1, height, width)
    outside = (1 - templates.amax(0).clamp(0, 1))[:, :, None] ** 4
    weight = outside.sum((1, 2, 3, 4))
    mean = (pixels * outside).sum((1, 3, 4)) / weight[:, None]
    deviation = ((pixels - mean[:, None, :, None, None]) ** 2).mean(2, keepdim=True)
    return ((deviation * outside).sum((1, 2, 3, 4)) / weight).sqrt()


def features(videos: Tensor) -> Tensor:
    """Return features of a fixed random convolutional net: uint8 (batch, frames, 3, height, width)
    to (batch, 64).
    """
    hidden = videos.float().transpose(1, 2) / 127.5 - 1  # (batch, channels, frames, height, width)
    for layer, (inputs, outputs) in enumerate([(3, 16), (16, 32), (32, 32)]):
        weight = normal((outputs, inputs, 3, 3, 3), "frechet features", layer) / math.sqrt(
            27 * inputs
        )
        hidden = torch.nn.functional.conv3d(hidden, weight, stride=(1, 2, 2), padding=1)
        hidden = torch.nn.functional.leaky_relu(hidden, 0.2) * 1.4
    return torch.cat([hidden.mean((2, 3, 4)), hidden.std((2, 3, 4))], dim=1).double()


def moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (dim,) and covariance (dim, dim) of feature vectors (batch, dim)."""
    return samples.mean(0), torch.cov(samples.T)


def frechet_distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    """Return the Fréchet distance of two Gaussians:
    ``|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2))``.
    """
    mean_a, cov_a = a
    mean_b, cov_b = b
    root_trace = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0).sqrt().sum()
    distance = ((mean_a - mean_b) ** 2).sum() + cov_a.trace() + cov_b.trace() - 2 * root_trace
    return float(distance)
