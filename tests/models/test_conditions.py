"""Tests of the conditions of a batch: selection, sharing and guidance."""

import pytest
import torch

from hyvideo.models.conditions import Condition, Conditions, ImageCondition


@pytest.fixture
def t2v():
    return Condition(torch.randn(5, 8))


@pytest.fixture
def i2v():
    return Condition(
        torch.randn(3, 8),
        torch.randn(4, 1472),
        ImageCondition(torch.randn(6, 20), torch.randn(2, 3, 4)),
    )


def test_moving_a_batch_moves_a_shared_condition_once(t2v, i2v):
    moved = Conditions((t2v, i2v, t2v)).to("meta")
    assert moved.samples[0] is moved.samples[2]
    image = moved.samples[1].image
    tensors = [
        moved.samples[0].text,
        moved.samples[1].text,
        moved.samples[1].glyph,
        image.embeds,
        image.latents,
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_the_negative_branch_of_guidance_keeps_the_image_and_replaces_the_text(t2v, i2v):
    negative = Condition(torch.randn(1, 8), torch.zeros(2, 1472))
    branch = Conditions((t2v, i2v)).with_text_of(negative)
    assert [sample.text is negative.text for sample in branch.samples] == [True, True]
    assert [sample.glyph is negative.glyph for sample in branch.samples] == [True, True]
    assert branch.samples[0].image is None and branch.samples[1].image is i2v.image
