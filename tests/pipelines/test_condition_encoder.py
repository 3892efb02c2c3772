"""Every part of a condition is encoded once; parts on disk."""

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.hunyuan_video15.prompt_encoders import TextEncoder
from hyvideo.pipelines import condition_encoder
from hyvideo.pipelines.condition_encoder import ConditionEncoder, PartStore

PROMPTS = ["a red circle moves up", "a blue square moves left slowly and then stops", "", "a red circle moves up"]
REQUESTS = [Request(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def text_encoder():
    return TextEncoder(*load_text_encoder("assets/miniature"))


@pytest.fixture
def make(text_encoder):
    """A function that makes an encoder which counts the prompts it really encodes; no glyphs, no images."""

    def make_encoder(store=None, dtype=torch.float32, identity=""):
        encoded = []

        def encode(prompts):
            encoded.extend(prompts)
            return text_encoder(prompts)

        def missing():
            raise AssertionError("no encoder of this kind is needed")

        encoder = ConditionEncoder(lambda: encode, missing, missing, dtype=dtype, identity=identity, store=store)
        return encoder, encoded

    return make_encoder


def test_a_prompt_is_encoded_once(make):
    encoder, encoded = make()
    first = encoder(REQUESTS)
    again = encoder(REQUESTS)
    assert encoded == PROMPTS[:3]
    assert first.samples[0] is first.samples[3]
    assert all(a is b for a, b in zip(first.texts, again.texts))


def test_what_is_encoded_has_the_dtype_that_the_transformer_computes_in(make):
    encoder, _ = make(dtype=torch.bfloat16)
    (condition,) = encoder(REQUESTS[:1]).samples
    assert condition.text.dtype == condition.glyph.dtype == torch.bfloat16


# --- on disk -------------------------------------------------------------------------------------


def test_a_second_run_reads_what_the_first_encoded(make, tmp_path):
    store = PartStore(tmp_path / "conditions")
    expected = make(store)[0](REQUESTS)
    encoder, encoded = make(store)
    for ours, theirs in zip(encoder(REQUESTS).texts, expected.texts):
        assert torch.equal(ours, theirs)
    assert encoded == []


def test_parts_that_were_not_asked_for_lately_leave_the_memory_for_the_disk(make, tmp_path, monkeypatch):
    monkeypatch.setattr(condition_encoder, "_MAX_IN_MEMORY", 2)
    encoder, encoded = make(PartStore(tmp_path))
    for number in (0, 1, 0, 2):
        encoder(REQUESTS[number : number + 1])
    for file in tmp_path.iterdir():
        file.unlink()
    encoder([REQUESTS[0], REQUESTS[2]])
    assert encoded == PROMPTS[:3]
    encoder(REQUESTS[1:2])
    assert encoded == [*PROMPTS[:3], PROMPTS[1]]


def test_other_encoders_or_another_dtype_share_nothing(make, tmp_path):
    store = PartStore(tmp_path)
    make(store, identity="one")[0](REQUESTS[:1])
    for changed in ({"identity": "two"}, {"identity": "one", "dtype": torch.bfloat16}):
        encoder, encoded = make(store, **changed)
        encoder(REQUESTS[:1])
        assert encoded == PROMPTS[:1]


def test_a_damaged_file_is_made_again(make, tmp_path):
    store = PartStore(tmp_path)
    make(store)[0](REQUESTS[:1])
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:50])
    encoder, encoded = make(store)
    encoder(REQUESTS[:1])
    assert encoded == PROMPTS[:1]
    assert file.read_bytes() == content


def test_released_encoders_are_read_again_only_when_they_are_needed(make):
    loads = []
    encoder, _ = make()
    load = encoder._loaders["text"]
    encoder._loaders["text"] = lambda: loads.append(1) or load()
    encoder(REQUESTS)
    encoder.release()
    encoder(REQUESTS)
    assert len(loads) == 1
    encoder([Request("a green triangle moves right")])
    assert len(loads) == 2
