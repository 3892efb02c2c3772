"""Captioned videos of moving colored shapes, a dataset that is small enough to train on a laptop's
CPU.

A video has 9 frames of 32 x 32 pixels at 8 fps. Its caption names color, shape and direction; there
are 48 captions.
"""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

COLORS = {
    "red": (0.92, 0.12, 0.12),
    "green": (0.12, 0.78, 0.20),
    "blue": (0.18, 0.32, 0.96),
    "yellow": (0.95, 0.85, 0.12),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "down": (0.0, 1.0), "up": (0.0, -1.0)}

NUM_FRAMES = 9
SIZE = 32
FPS = 8.0

PALETTE = torch.tensor(list(COLORS.values()))  # (colors, 3)
HEADINGS = torch.tensor(list(DIRECTIONS.values()))  # (directions, 2), x to the right and y down
LABELS = torch.tensor(list(itertools.product(range(4), range(3), range(4))))  # (captions, 3)


def caption(label: Tensor) -> str:
    color, shape, direction = label.tolist()
    return f"a {list(COLORS)[color]} {SHAPES[shape]} moves {list(DIRECTIONS)[direction]}"


CAPTIONS = [caption(label) for label in LABELS]
_LABEL_OF = dict(zip(CAPTIONS, LABELS))


def labels_of(captions: list[str]) -> Tensor:
    """Return color, shape and direction of each caption (batch, 3).

    Quoted text may follow a caption, as in ``a red circle moves right, "●"``. Raises ValueError for
    an unknown caption.
    """
    plain = [text.partition(', "')[0].strip().lower() for text in captions]
    unknown = [text for text, found in zip(captions, plain) if found not in _LABEL_OF]
    if unknown:
        raise ValueError(
            f"the miniature supports captions like {CAPTIONS[0]!r} (colors {', '.join(COLORS)}; "
            f"shapes {', '.join(SHAPES)}; directions {', '.join(DIRECTIONS)}), got {unknown[0]!r}"
        )
    return torch.stack([_LABEL_OF[text] for text in plain])


def pixel_grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return x and y of the pixel centers. Shape: (height, width) each."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return x, y


def signed_distances(dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Return the signed distance to each of three shapes of equal area, negative inside.

    Shape: (shapes, ...).
    """
    circle = (dx**2 + dy**2).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - radius * math.sqrt(math.pi) / 2
    inradius = radius * math.sqrt(math.pi / (3 * math.sqrt(3)))
    left_side = -0.5 * dy - dx * math.sqrt(3) / 2
    right_side = -0.5 * dy + dx * math.sqrt(3) / 2
    triangle = torch.maximum(dy, torch.maximum(left_side, right_side)) - inradius
    return torch.stack([circle, square, triangle])


def render(
    labels: Tensor,
    rng: np.random.Generator,
    corruption: Tensor | float = 0.0,
    *,
    from_middle: bool = False,
) -> Tensor:
    """Render videos of the labels, otherwise random, in [-1, 1].

    Shape: (batch, channels, frames, height, width).

    ``corruption`` is the strength, from 0 to 1, of a random defect: pixel noise, blur, a jittering
    path or flickering size. ``from_middle`` starts all objects in the middle, so that the first
    frame does not show the direction; objects are smaller, so that most of them stay in the frame.
    """
    batch = len(labels)
    defect = torch.from_numpy(rng.integers(4, size=batch))
    noise, blur, jitter, flicker = (corruption * defect.eq(kind) for kind in range(4))

    if from_middle:
        path = _path_from_middle(labels, rng)
        smallest, largest = 5.5, 7.0
    else:
        path = _path(labels, rng)
        smallest, largest = 6.3, 8.0
    centers = path + jitter[:, None, None] * 2.5 * _tensor(
        rng.standard_normal((batch, NUM_FRAMES, 2))
    )
    radius = _tensor(rng.uniform(smallest, largest, (batch, 1)))
    scale = 1 + flicker[:, None] * 0.35 * _tensor(rng.standard_normal((batch, NUM_FRAMES)))
    radius = radius * scale.clamp(0.4, 1.6)  # (batch, frames)

    x, y = pixel_grid(SIZE, SIZE)
    dx, dy = x - centers[..., 0, None, None], y - centers[..., 1, None, None]
    # (shapes, batch, frames, height, width)
    distances = signed_distances(dx, dy, radius[..., None, None])
    distance = distances[labels[:, 1], torch.arange(batch)]
    softness = (0.5 + 2.5 * blur)[:, None, None, None]
    cover = torch.sigmoid(-distance / softness)[:, None]  # (batch, 1, frames, height, width)

    tint = PALETTE[labels[:, 0]] + 0.04 * _tensor(rng.standard_normal((batch, 3)))
    tint = tint.clamp(0, 1)[:, :, None, None, None]
    background = _tensor(rng.uniform(0.05, 0.17, (batch, 1, 1, 1, 1)))
    video = background * (1 - cover) + tint * cover
    grain = _tensor(rng.standard_normal(video.shape, dtype=np.float32))
    video = video + noise[:, None, None, None, None] * 0.18 * grain
    return video.clamp(0, 1) * 2 - 1


def _path(labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the object's centers in pixels, on a straight line near the middle.

    Shape: (batch, frames, 2).
    """
    batch = len(labels)
    heading = HEADINGS[labels[:, 2]]
    sideways = heading.flip(1).abs()
    distance = _tensor(rng.uniform(10, 13, (batch, 1, 1)))
    middle = SIZE / 2 + heading * _tensor(rng.uniform(-1.5, 1.5, (batch, 1)))
    middle = middle + sideways * _tensor(rng.uniform(-5, 5, (batch, 1)))
    time = torch.linspace(-0.5, 0.5, NUM_FRAMES)[None, :, None]
    return middle[:, None] + heading[:, None] * distance * time


def _path_from_middle(labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the object's centers in pixels, on a straight line that starts in the middle.

    Shape: (batch, frames, 2).
    """
    batch = len(labels)
    heading = HEADINGS[labels[:, 2]]
    start = SIZE / 2 + _tensor(rng.uniform(-1.5, 1.5, (batch, 2)))
    distance = _tensor(rng.uniform(9, 11, (batch, 1, 1)))
    time = torch.linspace(0, 1, NUM_FRAMES)[None, :, None]
    return start[:, None] + heading[:, None] * distance * time


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
