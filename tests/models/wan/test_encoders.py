"""Tests of Wan's text encoder, compared with diffusers' pipeline."""

import json

import pytest
import torch

from hyvideo.models.wan.encoders import PARTS, TextEncoder, load_text_encoder
from tests.tiny_wan import TEXT_WIDTH, wan_pipeline, write_wan

TEXT = PARTS[0]
PROMPTS = {
    "no token": "",
    "HTML entities": "a &amp;amp;quot;red&amp;quot; car &lt; left &#x27;",
    "full width": "色调艳丽，过曝，静态！ red：car？",
    "broken text": "a red car â€“ left",
    "unknown": "a 中 car",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def encode(root):
    return TextEncoder(*load_text_encoder(root))


@pytest.fixture(scope="module")
def expect(root):
    """A function that returns diffusers' states of a prompt, padded to 512 tokens."""
    pipeline = wan_pipeline(root)

    @torch.no_grad()
    def encode_prompt(prompt):
        return pipeline.encode_prompt(prompt, None, False, max_sequence_length=512)[0][0]

    return encode_prompt


@pytest.fixture
def root_copy(tmp_path):
    return write_wan(tmp_path)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_states_match_diffusers_padded_to_512_tokens(encode, expect, prompt):
    (states,) = encode([prompt])
    expected = expect(prompt)
    padded = torch.nn.functional.pad(states, (0, 0, 0, 512 - len(states)))
    assert states[-1].abs().max() > 0.1
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_a_prompt_of_600_tokens_is_truncated_with_a_warning_that_shows_the_rest(encode, expect):
    prompt = "a " * 589 + "red car turns left 12345 (0)"
    with pytest.warns(
        UserWarning,
        match=r"6\d\d tokens.*512.*12345 \(0\)",
    ):
        (states,) = encode([prompt])
    expected = expect(prompt)
    assert states.shape == (512, TEXT_WIDTH)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_encoding_a_batch_of_different_lengths_matches_single_prompts(encode):
    prompts = [f"a {'red ' * (i % 3)}car {i}" for i in range(30)]
    for prompt, states in zip(prompts, encode(prompts)):
        torch.testing.assert_close(states, encode([prompt])[0], rtol=0, atol=3e-6)


def test_the_text_encoder_is_frozen_in_the_requested_dtype_with_bf16_for_fp16(root):
    for requested, expected in [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "bfloat16"),
    ]:
        _, model = load_text_encoder(root, dtype=getattr(torch, requested))
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, expected)}
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_tokenizer_file_is_used_unchanged(root_copy):
    """transformers' T5Tokenizer drops the byte fallback of tokenizer.json and maps unknown letters
    to <unk>.
    """
    path = root_copy / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["byte_fallback"] = True
    content["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    path.write_text(json.dumps(content))
    tokenizer, _ = load_text_encoder(root_copy)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 中").input_ids)[-4:] == [
        "<0xE4>",
        "<0xB8>",
        "<0xAD>",
        "</s>",
    ]


def test_a_random_text_encoder_needs_no_weights_and_is_reproducible(root_copy):
    (root_copy / "text_encoder" / "model.safetensors").unlink()
    first, second = (
        TextEncoder(*load_text_encoder(root_copy, random_weights_seed=3)) for _ in range(2)
    )
    (states,) = first(["a red car"])
    assert states.isfinite().all() and states.std() > 0.1
    assert torch.equal(states, second(["a red car"])[0])
    assert TEXT.problems(root_copy, False) == []


@pytest.mark.parametrize(
    "file",
    ["tokenizer/tokenizer.json", "text_encoder/model.safetensors"],
)
def test_a_missing_file_raises_an_error_that_names_it(root_copy, file):
    name = file.partition("/")[2]
    assert TEXT.problems(root_copy, True) == []
    (root_copy / file).unlink()
    with pytest.raises(ValueError, match=name):
        TEXT.problems(root_copy, True)
    with pytest.raises(ValueError, match=name):
        load_text_encoder(root_copy)
