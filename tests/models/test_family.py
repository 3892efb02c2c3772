"""Tests of the interface of a family, on the small checkpoint of HunyuanVideo-1.5."""

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.models.family import (
    Latents,
    blocks,
    family_of,
    prepare,
)


def test_requests_determine_the_kinds_of_conditions(transformer):
    kinds = family_of(transformer).kinds
    assert kinds([]) == set() and kinds([Request("")]) == {"text"}
    assert kinds([Request("a cat"), Request('a "cat"')]) == {"text", "glyph"}
    assert kinds([Request("a cat", "image.png")]) == {"text", "image"}
    assert kinds([Request('a "cat"', is_negative=True)]) == {"text"}  # as in HunyuanVideo-1.5


@pytest.mark.parametrize(
    "kinds, frozen",
    [
        ({"text"}, {"context_embedder_2", "image_embedder"}),
        ({"text", "glyph"}, {"image_embedder"}),
        ({"text", "image"}, {"context_embedder_2"}),
        ({"text", "glyph", "image"}, set()),
    ],
)
def test_modules_without_a_condition_in_the_run_are_frozen(transformer, kinds, frozen):
    prepare(transformer, kinds)
    for name, module in transformer.named_children():
        if name != family_of(transformer).blocks:
            assert all(
                parameter.requires_grad == (name not in frozen) for parameter in module.parameters()
            ), name
    assert [name for name, p in blocks(transformer)[-1].named_parameters() if not p.requires_grad]
    assert all(parameter.requires_grad for parameter in blocks(transformer)[0].parameters())


def test_latents_are_shifted_and_scaled_by_channel_and_back():
    latents = torch.randn(2, 3, 2, 4, 5)
    layout = Latents(
        channels=3, temporal=4, spatial=8, mean=(0.5, -1.0, 0.0), scale=(2.0, 0.5, 1.0)
    )
    scaled = layout.scaled(latents)
    for channel in range(3):
        expected = (latents[:, channel] - layout.mean[channel]) * layout.scale[channel]
        torch.testing.assert_close(scaled[:, channel], expected)
    torch.testing.assert_close(layout.unscaled(scaled), latents)
