"""Tests of the interface of a family, on the small checkpoint of HunyuanVideo-1.5."""

import pytest
import torch
from torch import nn

from hyvideo.data.prompts import Request
from hyvideo.models.family import (
    Latents,
    blocks,
    families,
    family_of,
    prepare,
)
from hyvideo.models.loading import load_vae
from hyvideo.models.registry import packages
from hyvideo.settings.config import Config

CLASS_NAMES = [name for name, package in packages().items() if package == "hunyuan_video15"]


def test_a_model_and_both_names_of_its_class_have_the_same_family(root, transformer):
    (family,) = {
        id(f): f for f in map(family_of, (transformer, load_vae(root), *CLASS_NAMES))
    }.values()
    assert family.name == "hunyuan_video15" and family in families()


@pytest.mark.parametrize("model", [nn.Linear(1, 1), "Linear"])
def test_a_class_without_a_family_raises_an_error(model):
    with pytest.raises(ValueError, match="Linear"):
        family_of(model)


def test_every_family_names_classes_of_diffusers():
    import diffusers

    for family in families():
        for component in (family.transformer, family.vae):
            assert (
                hasattr(diffusers, component.class_name)
                and packages()[component.class_name] == family.name
            )


def test_requests_determine_the_kinds_of_conditions(transformer):
    kinds = family_of(transformer).kinds
    assert kinds([]) == set() and kinds([Request("")]) == {"text"}
    assert kinds([Request("a cat"), Request('a "cat"')]) == {"text", "glyph"}
    assert kinds([Request("a cat", "image.png")]) == {"text", "image"}
    assert kinds([Request('a "cat"', is_negative=True)]) == {"text"}  # as in HunyuanVideo-1.5


def test_quoted_text_of_the_negative_prompt_is_not_encoded(transformer):
    guided = Config().with_settings(
        negative_prompt='bad text "LOREM"', cfg_scale=6.0, validation_cfg_scale=6.0
    )
    (request,) = guided.negative_requests
    assert request.prompt == 'bad text "LOREM"'
    contents = {part.kind: part.content(request) for part in family_of(transformer).parts}
    assert contents == {"text": 'bad text "LOREM"', "glyph": None, "image": None}


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
