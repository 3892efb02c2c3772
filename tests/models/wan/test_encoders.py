"""Wan's prompts and their states, against diffusers' pipeline."""

import json

import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan

from hyvideo.data.prompts import Request
from hyvideo.models.wan import encoders
from hyvideo.models.wan.encoders import PARTS, TextEncoder, clean, load_text_encoder
from tests.tiny_wan import TEXT_WIDTH, wan_pipeline, write_wan

(TEXT,) = PARTS
PROMPTS = {
    "no token": "",
    "one token": "a",
    "511 tokens": "a " * 511,
    "curly quotes": "“a red” car’s left",
    "HTML entities": "a &amp;amp;quot;red&amp;quot; car &lt; left &#x27;",
    "full width": "色调艳丽，过曝，静态！ red：car？",
    "broken text": "a red car â€“ left",
    "whitespace": "\n a \t red\u3000\u00a0 car \r\n",
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
    """Gives diffusers' states of a prompt, padded to 512 tokens."""
    pipeline = wan_pipeline(root)

    @torch.no_grad()
    def states_of(prompt):
        return pipeline.encode_prompt(prompt, None, False, max_sequence_length=512)[0][0]

    return states_of


@pytest.fixture
def own_root(tmp_path):
    return write_wan(tmp_path)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_states_are_those_of_diffusers_padded_to_512(encode, expect, prompt):
    (states,) = encode([prompt])
    expected = expect(prompt)
    padded = torch.nn.functional.pad(states, (0, 0, 0, 512 - len(states)))
    assert states[-1].abs().max() > 0.1
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_a_prompt_of_600_tokens_is_cut_with_a_warning_that_shows_what_is_left_out(encode, expect):
    prompt = "a " * 589 + "red car turns left 12345 (0)"
    with pytest.warns(UserWarning, match=r"has 6\d\d tokens, the model reads 512; left out .* turns left 12345 \(0\)"):
        (states,) = encode([prompt])
    expected = expect(prompt)
    assert states.shape == (512, TEXT_WIDTH)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_prompts_of_512_tokens_are_whole_and_those_of_513_are_cut(encode, recwarn):
    assert len(encode(["a " * 511])[0]) == 512
    assert not recwarn
    with pytest.warns(UserWarning, match="has 513 tokens"):
        assert len(encode(["a " * 512])[0]) == 512


def test_the_length_of_the_prompt_is_that_of_its_states(encode):
    states = encode(["", "a", "a a", "a red car"])
    assert [part.shape for part in states] == [(n, TEXT_WIDTH) for n in (1, 2, 3, 4)]


def test_prompts_of_many_lengths_come_back_in_their_order_as_one_by_one(encode):
    prompts = [f"a {'red ' * (i % 3)}car {i}" for i in range(30)]
    for prompt, states in zip(prompts, encode(prompts)):
        torch.testing.assert_close(states, encode([prompt])[0], rtol=0, atol=3e-6)


def test_the_part_gives_one_tensor_for_each_prompt(root):
    load = TEXT.load(root, vae=None, dtype=torch.float32, device="cpu", random_weights_seed=None)
    assert [part["states"].shape for part in load(["a", "a red car"], 32, 48)] == [(2, TEXT_WIDTH), (4, TEXT_WIDTH)]
    assert TEXT.content(Request("a")) == "a"


def test_a_prompt_is_repaired_unescaped_twice_and_stripped():
    assert clean("\n “a”  red，&amp;lt;car&gt;’s &amp;amp;amp; â€“ \u3000left ") == '"a" red,<car>\'s & – left'


def test_a_prompt_that_ftfy_may_change_is_refused_without_it(monkeypatch):
    monkeypatch.setattr(pipeline_wan, "is_ftfy_available", lambda: False)
    assert clean("A red car, (50%) 'left'\n") == "A red car, (50%) 'left'"
    for prompt in ("“left”", "a &amp; b", "red，left", "a\x1b[31m red", "ﬁve"):
        with pytest.raises(ValueError, match="(?s)pip install ftfy") as error:
            clean(prompt)
        assert repr(prompt) in str(error.value)


def test_ftfy_changes_no_prompt_that_is_cleaned_without_it(monkeypatch):
    kept = "".join(letter for letter in map(chr, range(256)) if not encoders._OUTSIDE_PLAIN_TEXT.search(letter))
    assert len(kept) == 97  # printable ASCII without "&", tab, line feed and carriage return
    with_ftfy = [clean(text) for text in (kept, kept[::-1])]
    monkeypatch.setattr(pipeline_wan, "is_ftfy_available", lambda: False)
    assert [clean(text) for text in (kept, kept[::-1])] == with_ftfy


def test_the_text_encoder_is_frozen_in_the_precision_asked_for_and_fp16_means_bf16(root):
    for asked, given in [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]:
        _, model = load_text_encoder(root, dtype=getattr(torch, asked))
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, given)}
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_tokenizer_is_the_file_as_it_is(own_root):
    """transformers' T5Tokenizer drops the byte fallback of tokenizer.json and makes every unknown letter <unk>."""
    path = own_root / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["byte_fallback"] = True
    content["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    path.write_text(json.dumps(content))
    tokenizer, _ = load_text_encoder(own_root)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 中").input_ids)[-4:] == ["<0xE4>", "<0xB8>", "<0xAD>", "</s>"]


def test_a_random_text_encoder_needs_no_weights_and_repeats_itself(own_root):
    (own_root / "text_encoder" / "model.safetensors").unlink()
    first, again = (TextEncoder(*load_text_encoder(own_root, random_weights_seed=3)) for _ in range(2))
    (states,) = first(["a red car"])
    assert states.isfinite().all() and states.std() > 0.1
    assert torch.equal(states, again(["a red car"])[0])
    assert TEXT.problems(own_root, False) == []


@pytest.mark.parametrize(
    "lost, message",
    [
        ("tokenizer/tokenizer_config.json", "no tokenizer_config.json"),
        ("tokenizer/tokenizer.json", "no tokenizer.json"),
        ("text_encoder/config.json", "-Diffusers.*config.json"),
        ("text_encoder/model.safetensors", "-Diffusers.*model.safetensors"),
    ],
)
def test_a_missing_file_is_named(own_root, lost, message):
    assert TEXT.problems(own_root, True) == []
    (own_root / lost).unlink()
    with pytest.raises(ValueError, match=message):
        TEXT.problems(own_root, True)
    with pytest.raises(ValueError, match=message):
        load_text_encoder(own_root)
