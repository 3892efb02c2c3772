"""Tests of the client with services that are slow, invalid, busy or unreachable."""

import http.server
import json
import math
import socket
import threading
import time

import pytest
import torch

from hyvideo.rewards.rewards import ScorerUnavailable
from hyvideo.rewards.scoring import AsyncScorer
from hyvideo.rewards.service.client import RemoteScorer, divide

TOKEN = "a-secret"


def remote(*urls, **options):
    options = {
        "token": TOKEN,
        "timeout": 20.0,
        "retries": 0,
        "backoff": 0.01,
        "cooldown": 60.0,
    } | options
    return RemoteScorer(urls, **options)


class Misbehaving:
    """An HTTP server in a thread that returns a given answer and counts the calls."""

    def __init__(self, answer, status=200, delay=0.0, drip=False, cut=False, headers=None):
        owner = self
        self.answer, self.status, self.calls = answer, status, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # sends "100 Continue"

            def do_POST(self):
                owner.calls += 1
                if cut:
                    self.connection.close()
                    return
                self.rfile.read(int(self.headers["content-length"]))
                time.sleep(delay)
                content = (
                    owner.answer
                    if isinstance(owner.answer, bytes)
                    else json.dumps(owner.answer).encode()
                )
                self.send_response(owner.status)
                self.send_header("content-length", str(len(content)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(content), 1 if drip else len(content) or 1):
                    try:
                        self.wfile.write(content[start : start + 1] if drip else content)
                        self.wfile.flush()
                    except OSError:
                        return
                    time.sleep(0.1 if drip else 0)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def misbehaving():
    servers = []

    def start(*arguments, **options):
        servers.append(Misbehaving(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


GOOD = {"scores": [{"VQ": 1.0}], "reasons": [None]}
CLIP = [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]


@pytest.mark.parametrize(
    "answer, options, message",
    [
        (b"<html>", {}, "JSONDecodeError"),
        ({"scores": []}, {}, "scores of 1 videos"),
        ({"scores": [{}, {}]}, {}, "scores of 1 videos"),
        ({"scores": [{"VQ": "1"}]}, {}, "must be numbers"),
        ({"scores": [{"VQ": True}]}, {}, "must be numbers"),
        ({"scores": [[1.0]]}, {}, "must be numbers"),
        ({"scores": 1}, {}, "scores of 1 videos"),
        ([1], {}, "scores of 1 videos"),
        (GOOD, {"status": 500}, "status 500"),
        (GOOD, {"status": 302}, "status 302"),
        (GOOD, {"delay": 3.0}, "was not complete within"),
        (GOOD, {"drip": True}, "was not complete within"),
        (GOOD, {"cut": True}, "Error"),
    ],
)
def test_invalid_and_slow_answers_make_the_service_unavailable(
    misbehaving, answer, options, message
):
    server = misbehaving(answer, **options)
    start = time.monotonic()
    with pytest.raises(ScorerUnavailable, match=message):
        remote(server.url, timeout=1.0).score(CLIP, ["a"], fps=8)
    assert time.monotonic() - start < 5


class Raw:
    """A TCP server in a thread that reads once and then sends bytes slowly."""

    def __init__(self, content, *, pause):
        self.left_after = None  # seconds until the client disconnected
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, args=(content, pause), daemon=True).start()

    def _serve(self, content, pause):
        connection, _ = self.listener.accept()
        start = time.monotonic()
        with connection:
            connection.recv(2**20)
            for byte in content:
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(pause)
        self.left_after = time.monotonic() - start


ANSWER = b'HTTP/1.1 200 OK\r\ncontent-length: 41\r\n\r\n{"scores": [{"VQ": 1.0}], "reasons": [0]}'


@pytest.mark.parametrize(
    "content", [ANSWER, b"HTTP/1.1 100 Continue\r\n\r\n" * 100], ids=["headers", "informational"]
)
def test_headers_sent_byte_by_byte_do_not_extend_the_timeout(content):
    num_threads = threading.active_count()
    server = Raw(content, pause=0.1)
    scorer = remote(server.url, timeout=1.0)
    start = time.monotonic()
    with pytest.raises(ScorerUnavailable, match="was not complete within 1.0 s"):
        scorer.score(CLIP, ["a"], fps=8)
    assert time.monotonic() - start < 1.5
    while server.left_after is None and time.monotonic() - start < 5:
        time.sleep(0.02)
    assert server.left_after < 2  # the connection was closed
    time.sleep(0.05)
    assert threading.active_count() <= num_threads


def test_a_service_that_reads_nothing_does_not_extend_the_timeout():
    # connections are accepted by the kernel but never read
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(ScorerUnavailable, match="was not complete within 1.0 s"):
            large = torch.zeros(64, 3, 512, 512, dtype=torch.uint8)
            remote(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=1.0).score(
                [large], ["a"], fps=8
            )
        assert time.monotonic() - start < 10  # without a limit it would wait forever


def test_a_slow_dns_lookup_does_not_extend_the_timeout(monkeypatch):
    resolved = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved.wait(10) and [])
    start = time.monotonic()
    with pytest.raises(ScorerUnavailable, match="was not complete within 1.0 s"):
        remote("http://reward.invalid", timeout=1.0).score(CLIP, ["a"], fps=8)
    resolved.set()
    assert time.monotonic() - start < 8


def test_a_connection_is_closed_when_its_answer_is_too_long(misbehaving):
    with pytest.raises(ScorerUnavailable, match="longer than 16777216 bytes"):
        remote(misbehaving(b" " * (2**24 + 1)).url).score(CLIP, ["a"], fps=8)


@pytest.mark.parametrize("text", [b'{"scores": [{"VQ": NaN}]}', b'{"scores": [{"VQ": null}]}'])
def test_a_non_numeric_value_is_a_missing_reward(misbehaving, text):
    async_scorer = AsyncScorer({"remote": remote(misbehaving(text).url)}, {"VQ": 1.0})
    (reward,) = async_scorer.measure(CLIP, ["a"], fps=8)
    async_scorer.close()
    assert (
        reward.is_missing and math.isnan(reward.total) and reward.reason == "no finite score for VQ"
    )


def test_an_unreachable_service_gives_missing_rewards_without_hanging():
    start = time.monotonic()
    async_scorer = AsyncScorer(
        {"remote": remote("http://127.0.0.1:9", retries=1)}, {"VQ": 1.0}, retries=3
    )
    rewards = async_scorer.measure(CLIP * 4, ["a"] * 4, fps=8)
    async_scorer.close()
    assert all(
        reward.is_missing and "no reward service answered" in reward.reason for reward in rewards
    )
    assert time.monotonic() - start < 5


def test_a_service_with_another_reward_model_is_not_used(misbehaving):
    """Such as one that was restarted with other weights in the middle of a run."""
    answer = {"scores": [{"VQ": 1.0}], "identity": "one"}
    service = misbehaving(answer)
    scorer = remote(service.url, cooldown=0.0)
    assert scorer.identity == ""
    for _ in range(2):
        (result,) = scorer.score(CLIP, ["a"], fps=8)
        assert result.scores == {"VQ": 1.0} and scorer.identity == "one"
    service.answer = answer | {"identity": "two"}
    with pytest.raises(ScorerUnavailable, match="another reward model than at the start"):
        scorer.score(CLIP, ["a"], fps=8)
    service.answer = {"scores": [{"VQ": 1.0}]}
    with pytest.raises(ScorerUnavailable, match="another reward model than at the start"):
        scorer.score(CLIP, ["a"], fps=8)
    service.answer = answer
    (result,) = scorer.score(CLIP, ["a"], fps=8)
    assert result.scores == {"VQ": 1.0}


def test_another_service_takes_over_until_the_failed_one_recovers(misbehaving):
    dead, alive = misbehaving(GOOD, status=500), misbehaving(GOOD)
    scorer = remote(dead.url, alive.url, cooldown=0.3)
    for _ in range(4):
        assert scorer.score(CLIP, ["a"], fps=8)[0].scores == {"VQ": 1.0}
    assert dead.calls == 1 and alive.calls == 4
    dead.status = 200
    time.sleep(0.35)
    for _ in range(4):
        scorer.score(CLIP, ["a"], fps=8)
    assert dead.calls >= 2


def test_a_rejected_request_is_not_sent_to_other_services(misbehaving):
    first, second = (
        misbehaving({"detail": "too many"}, status=413),
        misbehaving({"detail": "too many"}, status=413),
    )
    async_scorer = AsyncScorer({"remote": remote(first.url, second.url)}, {"VQ": 1.0}, retries=3)
    rewards = async_scorer.measure(CLIP * 4, ["a"] * 4, fps=8)
    async_scorer.close()
    assert all(reward.is_missing and "(413): " in reward.reason for reward in rewards)
    # four videos, halves, single videos; nothing is sent twice
    assert first.calls + second.calls == 1 + 2 + 4


def test_requests_are_divided_by_videos_and_bytes():
    assert divide([5] * 7, 100, 3) == [range(0, 3), range(3, 6), range(6, 7)]
    assert divide([5] * 5, 10, 9) == [range(0, 2), range(2, 4), range(4, 5)]
    assert divide([50, 3, 3, 50, 3], 10, 9) == [range(0, 1), range(1, 3), range(3, 4), range(4, 5)]


class FailsAfterOne(Misbehaving):
    status = property(lambda self: 200 if self.calls <= 1 else 500, lambda self, status: None)


def test_videos_after_a_failed_request_are_not_sent():
    server = FailsAfterOne(GOOD)
    results = remote(server.url, max_videos=1).score(CLIP * 4, ["a"] * 4, fps=8)
    server.server.shutdown()
    server.server.server_close()
    assert results[0].scores == {"VQ": 1.0} and server.calls == 2
    assert all("status 500" in result.reason for result in results[1:]) and len(results) == 4


def test_an_unreachable_service_at_the_start_raises_a_clear_error():
    with pytest.raises(ValueError, match="no reward service answered .http://127.0.0.1:9"):
        remote("http://127.0.0.1:9").check_prompts(["a"])
    with pytest.raises(ValueError, match="must be URLs such as"):
        RemoteScorer(["127.0.0.1:8000"])


def test_a_busy_service_is_retried_after_the_requested_time(misbehaving):
    busy = misbehaving({"detail": "full"}, status=503, headers={"retry-after": "1"})
    scorer = remote(busy.url, misbehaving(GOOD, status=500).url, retries=1, cooldown=60.0)
    threading.Timer(0.5, setattr, (busy, "status", 200)).start()
    busy.answer = GOOD
    start = time.monotonic()
    assert scorer.score(CLIP, ["a"], fps=8)[0].scores == {"VQ": 1.0}
    assert 1 <= time.monotonic() - start < 3 and busy.calls == 2


@pytest.mark.parametrize("answer", [b"[" * 10**5, b"\xff", b"[]", b'{"problem": 1}', b"1" * 5000])
def test_invalid_check_prompts_answers_raise_an_error(misbehaving, answer):
    with pytest.raises(ValueError, match="no reward service answered"):
        remote(misbehaving(answer).url).check_prompts(["a"])


def test_the_problem_of_a_prompt_is_printable(misbehaving):
    with pytest.raises(ValueError) as caught:
        remote(misbehaving(b'{"problem": "\\ud800 is wrong"}').url).check_prompts(["a"])
    assert str(caught.value) == "\\ud800 is wrong"


def test_the_pause_doubles_with_every_retry_of_a_request(monkeypatch):
    scorer, pauses = remote("http://127.0.0.1:1", retries=3, backoff=2.0, cooldown=0.0), []
    monkeypatch.setattr("hyvideo.rewards.service.client.time.sleep", pauses.append)
    for _ in range(2):
        with pytest.raises(ScorerUnavailable):
            scorer.score([torch.zeros(1, 3, 8, 8, dtype=torch.uint8)], ["a"], fps=8)
    assert pauses == [0, 2, 4, 8] * 2
