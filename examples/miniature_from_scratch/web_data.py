"""The "web data" of the base policy: wrong captions and defective videos, which post-training can
improve.
"""

import numpy as np
import torch
from torch import Tensor

from hyvideo.miniature.world import LABELS

# Probability that an attribute of a web caption is replaced by a random one, and that a web video
# has a defect.
CAPTION_NOISE = {"color": 0.35, "shape": 0.35, "direction": 0.5}
CORRUPTED_FRACTION = 0.5


def random_labels(number: int, rng: np.random.Generator) -> Tensor:
    """Draw labels uniformly. Shape: (number, 3)."""
    return LABELS[torch.from_numpy(rng.integers(len(LABELS), size=number))]


def web_labels(labels: Tensor, rng: np.random.Generator) -> Tensor:
    """Return labels with attributes replaced at random, with probabilities ``CAPTION_NOISE``.

    Shape: (batch, 3).
    """
    labels = labels.clone()
    for column, probability in enumerate(CAPTION_NOISE.values()):
        num_values = int(LABELS[:, column].max()) + 1
        wrong = torch.from_numpy(rng.random(len(labels)) < probability)
        guess = torch.from_numpy(rng.integers(num_values, size=len(labels)))
        labels[:, column] = torch.where(wrong, guess, labels[:, column])
    return labels


def corruption_strengths(batch: int, rng: np.random.Generator) -> Tensor:
    """Draw the strengths of defects: 0 for a clean video, else 0.4 to 1. Shape: (batch,)."""
    corrupted = rng.random(batch) < CORRUPTED_FRACTION
    return torch.from_numpy(np.asarray(corrupted * rng.uniform(0.4, 1.0, batch), dtype=np.float32))
