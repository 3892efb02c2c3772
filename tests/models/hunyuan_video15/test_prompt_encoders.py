"""Hidden states of prompts, against diffusers' own pipeline."""

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline

from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.hunyuan_video15.prompt_encoders import TextEncoder, glyph_text

PROMPTS = ["a red circle moves up", "a blue square moves left slowly and then stops", "", "a red circle moves up"]


@pytest.fixture(scope="module")
def text_encoder():
    return TextEncoder(*load_text_encoder("assets/miniature"))


def test_hidden_states_are_those_of_diffusers_without_the_padding(text_encoder):
    tokenizer, model = load_text_encoder("assets/miniature")
    expected, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        model, tokenizer, PROMPTS, "cpu", crop_start=text_encoder.crop_start
    )
    for states, row, valid in zip(text_encoder(PROMPTS), expected, mask.sum(1).tolist()):
        assert len(states) == valid
        torch.testing.assert_close(states, row[:valid], rtol=1e-5, atol=1e-5)


def test_a_prompt_too_long_is_cut_with_a_warning_that_shows_what_is_lost(text_encoder):
    with pytest.warns(UserWarning, match="the model reads 1000; left out from the end: '.*words'"):
        (states,) = text_encoder(["up " * 994 + "very last words"])
    assert len(states) == 1000


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("no quotes", ""),
        ('a sign says "OPEN"', 'Text "OPEN". '),
        ('“左” and "right" and “左”', 'Text "左". Text "right". '),
    ],
)
def test_text_in_quotes_is_found_as_diffusers_finds_it(prompt, expected):
    assert glyph_text(prompt) == expected
