"""Tests of the condition encoder: each part is encoded once, and stored parts are reused."""

import threading

import pytest
import torch

from hyvideo.data.prompts import Request
from hyvideo.models.hunyuan_video15.encoders import load_text_encoder
from hyvideo.models.hunyuan_video15.family import FAMILY
from hyvideo.models.hunyuan_video15.prompt_encoders import TextEncoder
from hyvideo.pipelines.condition_encoder import ConditionEncoder, PartCache, PartStore

PROMPTS = [
    "a red circle moves up",
    "a blue square moves left slowly and then stops",
    "",
    "a red circle moves up",
]
REQUESTS = [Request(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def text_encoder():
    return TextEncoder(*load_text_encoder("assets/miniature"))


@pytest.fixture
def make(text_encoder):
    """Return a function that creates a text encoder and the list of the prompts it has encoded."""

    def make_encoder(store=None, dtype=torch.float32, identity=""):
        encoded = []

        def encode(prompts, size):
            encoded.extend(prompts)
            return [{"states": states} for states in text_encoder(prompts)]

        def load(part):
            assert part.kind == "text", "no encoder of this kind is needed"
            return encode

        encoder = ConditionEncoder(FAMILY.parts, load, dtype=dtype, identity=identity, store=store)
        return encoder, encoded

    return make_encoder


def test_a_prompt_is_encoded_once(make):
    encoder, encoded = make()
    first = encoder(REQUESTS)
    again = encoder(REQUESTS)
    assert encoded == PROMPTS[:3]
    assert first.samples[0] is first.samples[3]
    assert all(a.text is b.text for a, b in zip(first.samples, again.samples))
    assert all(condition.glyph is condition.image is None for condition in first.samples)


def test_parts_have_the_compute_dtype_except_for_image_latents(tmp_path):
    (tmp_path / "image.png").write_bytes(b"an image")
    made = {
        "text": {"states": torch.randn(3, 8)},
        "glyph": {"states": torch.randn(2, 1472)},
        "image": {"embeds": torch.randn(4, 6), "latents": torch.randn(4, 2, 2)},
    }

    def load(part):
        return lambda contents, size: [made[part.kind]] * len(contents)

    encoder = ConditionEncoder(FAMILY.parts, load, dtype=torch.bfloat16)
    request = Request('a sign says "left"', str(tmp_path / "image.png"))
    (condition,) = encoder([request], (1, 32, 32)).samples
    assert (
        condition.text.dtype
        == condition.glyph.dtype
        == condition.image.embeds.dtype
        == torch.bfloat16
    )
    assert torch.equal(condition.image.latents, made["image"]["latents"])


def test_an_image_is_encoded_again_for_another_size_and_after_its_file_changed(tmp_path):
    path, seen = tmp_path / "image.png", []
    path.write_bytes(b"an image")

    def load(part):
        def encode(contents, size):
            seen.append((part.kind, *size[1:]))
            return [{"states": torch.zeros(1, 2)} for _ in contents]

        return encode

    encoder = ConditionEncoder(FAMILY.parts, load, dtype=torch.float32)
    request = Request("a cat", str(path))
    for height, width in ((32, 32), (32, 32), (32, 48), (48, 32)):
        encoder([request], (1, height, width))
    path.write_bytes(b"another image")
    store = encoder.store
    encoder = ConditionEncoder(FAMILY.parts, load, dtype=torch.float32)  # reads each file once
    encoder.store = store
    encoder([request], (1, 32, 32))
    sizes = [(32, 32), (32, 48), (48, 32), (32, 32)]
    assert seen == [("text", 32, 32), *(("image", *size) for size in sizes)]


def test_the_parts_in_memory_have_a_limit_above_which_the_least_recently_used_is_encoded_again(
    make,
):
    encoder, encoded = make()
    (condition,) = encoder(REQUESTS[:1]).samples
    two = 2 * condition.text.nbytes
    encoder, encoded = make(store=PartCache(max_bytes=two))
    same_length = [Request(f"a {color} circle moves up") for color in ("red", "blue", "green")]
    for number in (0, 1, 0, 2, 0, 1):
        (again,) = encoder([same_length[number]]).samples
        assert encoder.store.num_bytes <= two
    assert encoded == [same_length[number].prompt for number in (0, 1, 2, 1)]
    conditions = encoder(same_length).samples  # more at once than the limit
    assert all(
        torch.equal(a.text, b.text) for a, b in zip(conditions, make()[0](same_length).samples)
    )


# --- on disk -------------------------------------------------------------------------------------


def test_a_second_run_loads_the_parts_that_the_first_encoded(make, tmp_path):
    store = PartStore(tmp_path / "conditions")
    expected = make(store)[0](REQUESTS)
    encoder, encoded = make(store)
    for condition, other in zip(encoder(REQUESTS).samples, expected.samples):
        assert torch.equal(condition.text, other.text)
    assert encoded == []


def test_stored_parts_are_read_again_instead_of_kept_in_memory(make, tmp_path):
    encoder, encoded = make(PartStore(tmp_path))
    for number in (0, 1, 0):
        encoder(REQUESTS[number : number + 1])
    assert encoded == PROMPTS[:2]
    for file in tmp_path.iterdir():
        file.unlink()
    encoder(REQUESTS[:1])
    assert encoded == [*PROMPTS[:2], PROMPTS[0]]


def test_parts_are_not_shared_between_encoders_or_dtypes(make, tmp_path):
    store = PartStore(tmp_path)
    make(store, identity="one")[0](REQUESTS[:1])
    for changed in ({"identity": "two"}, {"identity": "one", "dtype": torch.bfloat16}):
        encoder, encoded = make(store, **changed)
        encoder(REQUESTS[:1])
        assert encoded == PROMPTS[:1]


def test_a_corrupted_file_is_encoded_again(make, tmp_path):
    store = PartStore(tmp_path)
    make(store)[0](REQUESTS[:1])
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:50])
    encoder, encoded = make(store)
    encoder(REQUESTS[:1])
    assert encoded == PROMPTS[:1]
    assert file.read_bytes() == content


def test_a_part_that_another_node_has_just_stored_is_waited_for(make, tmp_path):
    store = PartStore(tmp_path)
    make(store)[0](REQUESTS[:1])
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.unlink()
    encoder, encoded = make(PartStore(tmp_path))
    encoder.expect_stored()
    appears = threading.Timer(0.3, lambda: file.write_bytes(content))
    appears.start()
    encoder(REQUESTS[:1])
    assert encoded == []
    encoder.expect_stored(0.3)
    encoder(REQUESTS[1:2])  # nobody has stored it
    assert encoded == PROMPTS[1:2]


def test_released_encoders_are_loaded_again_only_when_needed(make):
    loads = []
    encoder, _ = make()
    load = encoder._load
    encoder._load = lambda part: loads.append(1) or load(part)
    encoder(REQUESTS)
    encoder.release()
    encoder(REQUESTS)
    assert len(loads) == 1
    encoder([Request("a green triangle moves right")])
    assert len(loads) == 2
