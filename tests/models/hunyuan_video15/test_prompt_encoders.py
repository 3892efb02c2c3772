"""Hidden states of prompts compared with diffusers' pipeline, and SigLIP's input pixels compared
with their formula.
"""

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from PIL import Image

from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.hunyuan_video15.prompt_encoders import TextEncoder, glyph_text, siglip_pixels
from tests.data.test_images import noise

PREPROCESSOR = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 384, "width": 384},
}
PROMPTS = [
    "a red circle moves up",
    "a blue square moves left slowly and then stops",
    "",
    "a red circle moves up",
]


@pytest.fixture(scope="module")
def text_encoder():
    return TextEncoder(*load_text_encoder("assets/miniature"))


def test_hidden_states_match_diffusers_without_padding(text_encoder):
    tokenizer, model = load_text_encoder("assets/miniature")
    expected, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        model, tokenizer, PROMPTS, "cpu", crop_start=text_encoder.crop_start
    )
    for states, row, valid in zip(text_encoder(PROMPTS), expected, mask.sum(1).tolist()):
        assert len(states) == valid
        torch.testing.assert_close(states, row[:valid], rtol=1e-5, atol=1e-5)


def test_a_long_prompt_is_truncated_with_a_warning_that_shows_the_rest(text_encoder):
    with pytest.warns(UserWarning, match="1000.*words"):
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
def test_quoted_text_is_extracted_as_in_diffusers(prompt, expected):
    assert glyph_text(prompt) == expected


# --- SigLIP -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resample": 2, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 0.7]},
        {"resample": 1, "do_rescale": False},
    ],
)
def test_siglip_pixels_match_the_formula_exactly(changes):
    preprocessor = PREPROCESSOR | changes
    image = noise(96, 170)
    size = preprocessor["size"]
    resized = image.resize(
        (size["width"], size["height"]), Image.Resampling(preprocessor["resample"])
    )
    expected = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    if preprocessor["do_rescale"]:
        expected = expected.double() * preprocessor["rescale_factor"]
    expected = expected.float()
    if preprocessor["do_normalize"]:
        mean, std = (
            torch.tensor(preprocessor[name]).view(-1, 1, 1) for name in ("image_mean", "image_std")
        )
        expected = (expected - mean) / std
    pixels = siglip_pixels(image, preprocessor)
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, expected)
