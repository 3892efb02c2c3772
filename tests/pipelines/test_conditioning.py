"""Prompts to conditions, against diffusers' own pipeline."""

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline

from hyvideo.models.loading import load_text_encoder
from hyvideo.pipelines.conditioning import Conditions, PromptEncoder

PROMPTS = ["a red circle moves up", "a blue square moves left slowly and then stops", "a red circle moves up"]


@pytest.fixture(scope="module")
def encoder():
    return PromptEncoder(*load_text_encoder("assets/miniature"), image_width=16)


def test_hidden_states_are_those_of_diffusers_without_the_padding(encoder):
    expected, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        encoder.text_encoder, encoder.tokenizer, PROMPTS, "cpu", crop_start=encoder.crop_start
    )
    conditions = encoder(PROMPTS)
    assert conditions.text_lengths == tuple(mask.sum(1).tolist())
    assert conditions.text.shape[1] == max(conditions.text_lengths)
    for row, length in enumerate(conditions.text_lengths):
        torch.testing.assert_close(conditions.text[row, :length], expected[row, :length], rtol=1e-5, atol=1e-5)


def test_a_prompt_is_encoded_once(encoder, monkeypatch):
    encoder(PROMPTS)
    monkeypatch.setattr(encoder, "text_encoder", None)
    assert torch.equal(encoder(PROMPTS).text[0], encoder(PROMPTS).text[2])


def test_selected_rows_are_trimmed_to_the_longest_of_them(encoder):
    conditions = encoder(PROMPTS)
    assert not conditions.text_is_full
    short = conditions.select([0, 2])
    assert short.text_is_full and short.text.shape[1] == conditions.text_lengths[0]
    both = Conditions.cat([short, conditions.select([1])])
    assert torch.equal(both.text_mask.sum(1), torch.tensor(both.text_lengths))


def test_quoted_text_is_refused_and_not_dropped(encoder):
    with pytest.raises(ValueError, match="double quotes"):
        encoder(['a sign that says "open"'])
