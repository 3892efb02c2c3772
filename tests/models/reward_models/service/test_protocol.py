"""Messages of the service and its client: what comes back bit for bit, and what is refused."""

import io
import json
import math
import random
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from hyvideo.data.videos import read_video, write_video
from hyvideo.models.reward_models.rewards import ScoreResult
from hyvideo.models.reward_models.service import protocol
from hyvideo.models.reward_models.service.protocol import (
    BadRequest,
    Limits,
    ScoreRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)


def test_a_request_comes_back_bit_for_bit():
    videos = [torch.randint(0, 256, (3, 3, 8, 6), dtype=torch.uint8), torch.zeros(2, 3, 4, 4, dtype=torch.uint8)]
    request = decode_request(encode_request(ScoreRequest(videos, ["a", "“b”\n"], 24000 / 1001)), Limits())
    assert all(torch.equal(a, b) for a, b in zip(request.videos, videos))
    assert (request.prompts, request.fps) == (["a", "“b”\n"], 24000 / 1001)


def test_an_mp4_is_read_with_its_own_rate(tmp_path):
    video = torch.full((4, 3, 256, 256), 90, dtype=torch.uint8)
    write_video(tmp_path / "v.mp4", video, 12)
    tensor = torch.frombuffer(bytearray((tmp_path / "v.mp4").read_bytes()), dtype=torch.uint8)
    body = save({"mp4.0": tensor}, metadata={"prompts": '["a"]', "fps": "8"})
    request = decode_request(body, Limits())
    assert request.videos[0].shape == video.shape and request.fps == 12
    with pytest.raises(BadRequest, match="no readable mp4"):
        decode_request(save({"mp4.0": tensor[:50]}, metadata={"prompts": '["a"]', "fps": "8"}), Limits())


def film(path, sizes, codec="libx264"):
    """The bytes of an mp4 of black frames as a tensor. With mjpeg each frame has its own size; the first is told."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8, options={"preset": "ultrafast"} if codec == "libx264" else {})
        stream.width = stream.height = sizes[0]
        stream.pix_fmt = "yuv420p" if codec == "libx264" else "yuvj420p"
        for number, size in enumerate(sizes):
            container.mux(_packets(stream, number, size, codec))
        if codec == "libx264":
            container.mux(stream.encode())
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _packets(stream, number, size, codec):
    if codec == "libx264":
        frame = av.VideoFrame.from_ndarray(np.zeros((size * 3 // 2, size), np.uint8), format="yuv420p")
        frame.pts = number
        return stream.encode(frame)
    picture = io.BytesIO()
    Image.new("RGB", (size, size)).save(picture, "JPEG")
    packet = av.Packet(picture.getvalue())
    packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 8)
    packet.is_keyframe = True
    return [packet]


def films_request(*films):
    metadata = {"prompts": json.dumps(["a"] * len(films)), "fps": "8"}
    return save({f"mp4.{number}": content for number, content in enumerate(films)}, metadata=metadata)


@pytest.fixture
def num_decoded(monkeypatch):
    """How many films have been decoded, in a list."""
    paths = []

    def counted(path, **options):
        paths.append(path)
        return read_video(path, **options)

    monkeypatch.setattr(protocol, "read_video", counted)
    return lambda: len(paths)


@pytest.mark.parametrize(
    "sizes, said",
    [
        ([64] * 1025, "mp4.0 may have 1024 frames of 4194304 pixels, got .1025, 3, 64, 64."),
        ([64] * 5000, "mp4.0 may have 1024 frames of 4194304 pixels, got .1025, "),
        ([2050], "mp4.0 may have 1024 frames of 4194304 pixels, got .1, 3, 2050, 2050."),
        ([1024] * 400, "may have 1073741824 bytes when decoded, mp4.0 has 1258291200"),
    ],
)
def test_a_small_film_of_huge_frames_is_refused_before_it_is_decoded(tmp_path, num_decoded, sizes, said):
    content = film(tmp_path / "v.mp4", sizes)
    assert content.numel() < 2**20
    with pytest.raises(BadRequest, match=said) as caught:
        decode_request(films_request(content), Limits())
    assert caught.value.is_too_large and num_decoded() == 0


def test_the_films_of_a_request_share_the_bytes_that_it_may_have(tmp_path, num_decoded):
    content = film(tmp_path / "v.mp4", [64] * 10)  # 122 880 bytes when decoded
    assert len(decode_request(films_request(content, content.clone()), Limits(body=245_760)).videos) == 2
    with pytest.raises(BadRequest, match="mp4.1 has 122880") as caught:
        decode_request(films_request(content, content.clone()), Limits(body=245_759))
    assert caught.value.is_too_large and num_decoded() == 3


@pytest.mark.parametrize("sizes", [[64, 1024], [64, 64, 32]])
def test_a_film_that_lies_about_its_size_is_left_at_the_first_such_frame(tmp_path, sizes):
    assert decode_request(films_request(film(tmp_path / "v.mp4", [64, 64], "mjpeg")), Limits()).videos[0].shape[0] == 2
    with pytest.raises(BadRequest, match="no readable mp4") as caught:
        decode_request(films_request(film(tmp_path / "v.mp4", sizes, "mjpeg")), Limits())
    assert f"got frame {len(sizes) - 1} of ({sizes[-1]}, {sizes[-1]}, 3)" in str(caught.value.__cause__)


def test_a_broken_film_is_a_bad_request_and_nothing_else(tmp_path):
    rng = random.Random(0)
    good = film(tmp_path / "v.mp4", [64] * 3)
    num_refused = 0
    for _ in range(60):
        broken = good.clone()
        for _ in range(rng.randrange(1, 20)):
            broken[rng.randrange(8, len(broken))] = rng.randrange(256)
        try:
            decode_request(films_request(broken), Limits())
        except BadRequest:
            num_refused += 1
    assert num_refused > 5


@pytest.mark.parametrize(
    "limits, said",
    [
        (Limits(body=100), "may have 100 bytes"),
        (Limits(videos=1), "may have 1 videos, got 2"),
        (Limits(frames=2), "may have 2 frames"),
        (Limits(pixels=10), "frames of 10 pixels"),
    ],
)
def test_limits_hold_before_anything_is_made_of_the_body(limits, said):
    videos = [torch.zeros(3, 3, 8, 6, dtype=torch.uint8)] * 2
    with pytest.raises(BadRequest, match=said) as caught:
        decode_request(encode_request(ScoreRequest(videos, ["a", "b"], 8.0)), limits)
    assert caught.value.is_too_large


def test_answers_keep_what_is_missing():
    results = [ScoreResult({"VQ": 1.5}), ScoreResult({"VQ": math.nan}), ScoreResult({}, "broken")]
    first, second, third = decode_answer(json.dumps(encode_answer(results)).encode(), 3)
    assert first == results[0] and math.isnan(second.scores["VQ"]) and third == results[2]


def random_json(rng, depth=0):
    kind = rng.randrange(9 if depth < 4 else 7)
    if kind == 7:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 8:
        names = rng.sample(["scores", "reasons", "VQ", "\ud800"], rng.randrange(4))
        return {name: random_json(rng, depth + 1) for name in names}
    return [None, True, 1.5, math.inf, 10**400, -(10**309), "\ud800"][kind]


def check_answer(body):
    """Whether it gives results; else it must raise ValueError. All texts can be printed, all scores are floats."""
    try:
        results = decode_answer(body, 1)
    except ValueError as error:
        str(error).encode()
        return False
    assert all(isinstance(value, float) for result in results for value in result.scores.values())
    "".join(result.reason or "" for result in results).encode()
    return True


def test_random_answers_are_results_or_value_errors():
    rng = random.Random(0)
    kinds = [
        check_answer(json.dumps({"scores": [random_json(rng)], "reasons": [random_json(rng)]})) for _ in range(3000)
    ]
    kinds += [check_answer(json.dumps(random_json(rng))) for _ in range(1000)]
    good = json.dumps({"scores": [{"VQ": 1.0}], "reasons": [None]}).encode()
    for _ in range(3000):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        kinds.append(check_answer(bytes(body)))
    assert 100 < sum(kinds) < len(kinds) - 100


@pytest.mark.parametrize(
    "frame",
    ["%s", '{"scores": [%s]}', '{"scores": [{"VQ": %s}]}', '{"scores": [null], "reasons": [%s]}', '{"scores": %s}'],
)
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "1}"), ("[", "")])
def test_answers_nested_deeply_are_results_or_value_errors(frame, brackets):
    left = sys.getrecursionlimit()
    for depth in (*range(left - 150, left + 5), 10**5):  # at the edge, what reads a value fails or what shows it
        opening, closing = brackets
        check_answer((frame % (opening * depth + closing * depth)).encode())
