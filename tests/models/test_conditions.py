"""Conditions of a batch: selecting, sharing, guidance, and what stands beside the latents."""

import pytest
import torch

from hyvideo.models.conditions import Condition, Conditions, ImageCondition


@pytest.fixture
def t2v():
    return Condition(torch.randn(5, 8), torch.zeros(0, 1472))


@pytest.fixture
def i2v():
    return Condition(torch.randn(3, 8), torch.randn(4, 1472), ImageCondition(torch.randn(6, 20), torch.randn(2, 3, 4)))


def test_selected_rows_are_the_same_objects(t2v, i2v):
    conditions = Conditions((t2v, i2v, t2v))
    assert conditions.select([2, 1]).samples == (t2v, i2v)
    assert len(conditions + conditions) == 6


def test_moving_a_batch_moves_a_shared_condition_once(t2v, i2v):
    moved = Conditions((t2v, i2v, t2v)).to("meta")
    assert moved.samples[0] is moved.samples[2]
    image = moved.samples[1].image
    tensors = [*moved.texts, *moved.glyphs, image.embeds, image.latents]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_the_negative_branch_of_guidance_keeps_the_image_and_has_words_of_its_own(t2v, i2v):
    negative = Condition(torch.randn(1, 8), torch.zeros(2, 1472))
    branch = Conditions((t2v, i2v)).with_text_of(negative)
    assert [sample.text is negative.text for sample in branch.samples] == [True, True]
    assert [sample.glyph is negative.glyph for sample in branch.samples] == [True, True]
    assert branch.samples[0].image is None and branch.samples[1].image is i2v.image


def test_only_image_to_video_has_vision_features(t2v, i2v):
    assert [states.shape for states in Conditions((t2v, i2v)).image_embeds(20)] == [(0, 20), (6, 20)]


def test_the_first_frame_stands_beside_the_latents_with_its_mask(t2v, i2v):
    latents = torch.randn(2, 2, 5, 3, 4)
    beside = Conditions((t2v, i2v)).image_channels(latents)
    assert beside.shape == (2, 3, 5, 3, 4)
    assert not beside[0].any()
    assert torch.equal(beside[1, :2, 0], i2v.image.latents)
    assert torch.equal(beside[1, 2, 0], torch.ones(3, 4))
    assert not beside[1, :, 1:].any()
