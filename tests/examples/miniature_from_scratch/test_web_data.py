"""Tests of the labels of the web data."""

import pytest
import torch

from examples.miniature_from_scratch.web_data import (
    CAPTION_NOISE,
    CORRUPTED_FRACTION,
    corruption_strengths,
    web_labels,
)
from hyvideo.data.randomness import generator
from hyvideo.miniature.world import LABELS


def rng(*key):
    return generator(0, "test world", *key)


def test_web_labels_are_wrong_with_the_given_probability():
    labels = LABELS.repeat(400, 1)
    before = labels.clone()
    noisy = web_labels(labels, rng("web"))
    assert torch.equal(labels, before)  # the input is not modified
    for column, (probability, num_values) in enumerate(zip(CAPTION_NOISE.values(), (4, 3, 4))):
        changed = (noisy[:, column] != labels[:, column]).float().mean().item()
        assert changed == pytest.approx(probability * (1 - 1 / num_values), abs=0.015)
        pairs = set(zip(labels[:, column].tolist(), noisy[:, column].tolist()))
        assert len(pairs) == num_values**2  # every value may be replaced by every other


def test_half_of_the_videos_have_a_defect_of_strength_0_4_or_more():
    strength = corruption_strengths(4000, rng("strength"))
    corrupted = strength[strength > 0]
    assert len(corrupted) / 4000 == pytest.approx(CORRUPTED_FRACTION, abs=0.03)
    assert corrupted.min() >= 0.4 and corrupted.max() <= 1
    assert corrupted.mean().item() == pytest.approx(0.7, abs=0.02)
