"""Tests of the messages between the service and its client."""

import json
import math
import random
import sys

import pytest
import torch
from safetensors.torch import load

from hyvideo.rewards.rewards import ScoreResult
from hyvideo.rewards.service.protocol import (
    BadRequest,
    Limits,
    ScoreRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)


def encoded(request):
    return bytearray(b"".join(encode_request(request)))


def test_a_request_is_a_safetensors_file():
    frames = torch.randint(0, 256, (3, 8, 6, 3), dtype=torch.uint8).movedim(-1, 1)  # not contiguous
    videos = [frames, frames, frames[:1, :, :2, :1]]
    for number in range(8):  # headers of any length
        tensors = load(bytes(encoded(ScoreRequest(videos, ["a", "b" * number, "“c”"], 8.0))))
        assert len(tensors) == 3
        assert all(torch.equal(tensors[f"video.{row}"], video) for row, video in enumerate(videos))


def test_videos_are_encoded_and_decoded_without_a_copy():
    video = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    _, frames = encode_request(ScoreRequest([video], ["a"], 8.0))
    body = encoded(ScoreRequest([video], ["a"], 8.0))
    decoded = decode_request(body, Limits()).videos[0]
    video[1, 2, 3, 3] = 7
    assert frames[-1] == 7
    body[-1] = 9
    assert decoded[1, 2, 3, 3] == 9


def test_a_request_round_trip_is_bit_exact():
    videos = [
        torch.randint(0, 256, (3, 3, 8, 6), dtype=torch.uint8),
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
    ]
    request = decode_request(encoded(ScoreRequest(videos, ["a", "“b”\n"], 24000 / 1001)), Limits())
    assert all(torch.equal(a, b) for a, b in zip(request.videos, videos))
    assert (request.prompts, request.fps) == (["a", "“b”\n"], 24000 / 1001)


@pytest.mark.parametrize(
    "limits, message",
    [
        (Limits(body=100), "may have at most 100 bytes"),
        (Limits(videos=1), "may have at most 1 videos, got 2"),
        (Limits(frames=2), "may have at most 2 frames"),
        (Limits(pixels=10), "frames of 10 pixels"),
    ],
)
def test_limits_are_checked_before_the_body_is_decoded(limits, message):
    videos = [torch.zeros(3, 3, 8, 6, dtype=torch.uint8)] * 2
    with pytest.raises(BadRequest, match=message):
        decode_request(encoded(ScoreRequest(videos, ["a", "b"], 8.0)), limits)


@pytest.mark.parametrize(
    "offsets", [None, [0], [0, 47], [0, 49], [1, 49], [-1, 47], [48, 0], ["0", "48"], [0, 2**70]]
)
def test_a_video_outside_the_body_is_rejected(offsets):
    shape = '"dtype": "U8", "shape": [1, 3, 4, 4]'
    entry = f'"video.0": {{{shape}, "data_offsets": {json.dumps(offsets)}}}'
    header = f'{{"__metadata__": {{"prompts": "[\\"a\\"]", "fps": "8"}}, {entry}}}'.encode()
    body = bytearray(len(header).to_bytes(8, "little") + header + bytes(48))
    with pytest.raises(BadRequest, match=r"data_offsets of video.0 must enclose 48 bytes"):
        decode_request(body, Limits())
    body = bytearray(bytes(body).replace(json.dumps(offsets).encode(), b"[0, 48]"))
    body[:8] = (len(body) - 56).to_bytes(8, "little")
    assert decode_request(body, Limits()).videos[0].shape == (1, 3, 4, 4)


def test_answers_keep_missing_scores():
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
    """Return whether the answer is valid, and check that texts are printable and scores are
    floats.
    """
    try:
        results = decode_answer(body, 1)
    except ValueError as error:
        str(error).encode()
        return False
    assert all(isinstance(value, float) for result in results for value in result.scores.values())
    "".join(result.reason or "" for result in results).encode()
    return True


def test_random_answers_give_results_or_value_errors():
    rng = random.Random(0)
    kinds = [
        check_answer(json.dumps({"scores": [random_json(rng)], "reasons": [random_json(rng)]}))
        for _ in range(3000)
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
    [
        "%s",
        '{"scores": [%s]}',
        '{"scores": [{"VQ": %s}]}',
        '{"scores": [null], "reasons": [%s]}',
        '{"scores": %s}',
    ],
)
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "1}"), ("[", "")])
def test_deeply_nested_answers_give_results_or_value_errors(frame, brackets):
    left = sys.getrecursionlimit()
    # near the limit, either parsing or printing fails
    for depth in (*range(left - 150, left + 5), 10**5):
        opening, closing = brackets
        check_answer((frame % (opening * depth + closing * depth)).encode())
