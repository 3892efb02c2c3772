"""The client with services that are slow, invalid, busy, changed or unreachable."""

import http.server
import json
import os
import threading
import time
from unittest.mock import patch

import pytest
import torch

from hyvideo.rewards.rewards import ScorerUnavailable
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.rewards.service import client
from hyvideo.rewards.service.client import RemoteScorer
from hyvideo.rewards.service.protocol import decode_request, encode_request

TOKEN = "a-secret"
GOOD = {"scores": [{"VQ": 1.0}], "reasons": [None], "identity": "one"}
CLIP = [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]


def remote(*urls, **options):
    options = {"timeout": 20.0, "retries": 0, "backoff": 0.01} | options
    with patch.dict(os.environ, REWARD_SERVER_TOKEN=TOKEN):
        return RemoteScorer(url=list(urls), **options)


class Service:
    """An HTTP server in a thread with a given answer, which counts the requests with videos."""

    def __init__(self, answer=GOOD, status=200, delay=0.0, headers=None):
        owner = self
        self.answer, self.status, self.delay, self.calls = answer, status, delay, 0
        self.busy_answers = 0  # before it is ready

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.respond(503 if owner.busy_answers > 0 else 200, b"{}")
                owner.busy_answers -= 1

            def do_POST(self):
                owner.calls += 1
                self.rfile.read(int(self.headers["content-length"]))
                time.sleep(owner.delay)
                is_text = isinstance(owner.answer, bytes)
                content = owner.answer if is_text else json.dumps(owner.answer).encode()
                self.respond(owner.status, content)

            def respond(self, status, content):
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def start():
    servers = []

    def start(*arguments, **options):
        servers.append(Service(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def test_a_request_round_trip_is_bit_exact():
    both = torch.randint(0, 256, (2, 5, 3, 8, 6), dtype=torch.uint8)  # videos that share memory
    prompts = ["a", 'é "quoted"\n']
    body = encode_request([*both, both[0].transpose(-1, -2)], [*prompts, ""], 23.976)
    videos, texts, fps = decode_request(body)
    assert all(map(torch.equal, videos, [*both, both[0].transpose(-1, -2)]))
    assert (texts, fps) == ([*prompts, ""], 23.976)


@pytest.mark.parametrize(
    "answer, options, message",
    [
        (b"<html>", {}, "Invalid JSON"),
        (GOOD | {"scores": []}, {}, "scores of 0 of 1 videos"),
        (GOOD, {"delay": 0.6}, "ReadTimeout"),
    ],
)
def test_invalid_and_slow_answers_make_the_service_unavailable(start, answer, options, message):
    service = start(answer, **options)
    with pytest.raises(ScorerUnavailable, match=message):
        remote(service.url, timeout=0.3).score(CLIP, ["a"], fps=8)


def test_an_unreachable_service_gives_missing_rewards_without_hanging():
    start = time.monotonic()
    scorer = AsyncScorer({"remote": remote("http://127.0.0.1:9", retries=1)}, {"VQ": 1.0})
    rewards = scorer.measure(CLIP * 4, ["a"] * 4, fps=8)
    scorer.close()
    assert all(reward.is_missing for reward in rewards)
    assert time.monotonic() - start < 5


def test_an_unreachable_service_at_the_start_raises_an_error_with_its_address():
    with pytest.raises(ValueError, match="http://127.0.0.1:9"):
        remote("http://127.0.0.1:9").check_prompts(["a"])
    with pytest.raises(ValueError, match="option url"):
        RemoteScorer(url="127.0.0.1:8000")
    with pytest.raises(ValueError, match="option url"):  # a password would be recorded
        RemoteScorer(url="http://user:password@127.0.0.1:8000")
    assert len(RemoteScorer(url="http://a:1, http://b:2")._clients) == 2


def test_a_service_with_another_reward_model_is_not_used(start):
    """Such as one that was restarted with other weights in the middle of a run."""
    service = start()
    scorer = remote(service.url)
    assert scorer.identity == ""
    for _ in range(2):
        (result,) = scorer.score(CLIP, ["a"], fps=8)
        assert result.scores == {"VQ": 1.0} and scorer.identity == "one"
    service.answer = GOOD | {"identity": "two"}
    with pytest.raises(ScorerUnavailable, match="reward model"):
        scorer.score(CLIP, ["a"], fps=8)
    service.answer = GOOD
    (result,) = scorer.score(CLIP, ["a"], fps=8)
    assert result.scores == {"VQ": 1.0}


def test_services_take_turns_and_one_that_failed_comes_last(start, monkeypatch):
    first, second = start(), start()
    scorer = remote(first.url, second.url)
    for _ in range(4):
        scorer.score(CLIP, ["a"], fps=8)
    assert first.calls == second.calls == 2
    first.status = 500
    for _ in range(4):
        assert scorer.score(CLIP, ["a"], fps=8)[0].scores == {"VQ": 1.0}
    assert first.calls == 3 and second.calls == 6
    first.status = 200
    monkeypatch.setattr(client, "COOLDOWN", 0.0)
    for _ in range(2):
        scorer.score(CLIP, ["a"], fps=8)
    assert first.calls == 4


def test_a_busy_service_is_asked_again_before_videos_are_sent(start):
    service = start(headers={"retry-after": "1"})
    service.busy_answers = 1
    begin = time.monotonic()
    assert remote(service.url, retries=1).score(CLIP, ["a"], fps=8)[0].scores == {"VQ": 1.0}
    assert 1 <= time.monotonic() - begin and service.calls == 1


@pytest.mark.parametrize("max_bytes, calls", [(2**28, 2), (1, 3)])
def test_large_batches_are_divided_by_videos_and_bytes(start, monkeypatch, max_bytes, calls):
    monkeypatch.setattr(client, "MAX_REQUEST_BYTES", max_bytes)
    service = start(GOOD | {"scores": [{}] * 2, "reasons": ["dark"] * 2})
    scorer = remote(service.url, max_videos=2)
    if max_bytes == 1:
        service.answer = GOOD
    results = scorer.score(CLIP * (4 if max_bytes > 1 else 3), ["a"] * 4, fps=8)
    assert service.calls == calls and len(results) == (4 if max_bytes > 1 else 3)
