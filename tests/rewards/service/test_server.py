"""Tests of the service in this process, with a scorer that waits until the test releases it."""

import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.rewards.rewards import ScorerUnavailable
from hyvideo.rewards.service.connections import make_server
from hyvideo.rewards.service.protocol import (
    Limits,
    ScoreRequest,
    encode_request,
)
from hyvideo.rewards.service.server import Batcher, create_app
from tests.rewards.service.test_client import CLIP, TOKEN, remote


class HeldScorer:
    """Scores a video by its first pixel once released, and records the batches."""

    def __init__(self):
        self.started, self.released = threading.Event(), threading.Event()
        self.batches = []

    def score(self, videos, prompts, *, fps):
        self.batches.append([int(video[0, 0, 0, 0]) for video in videos])
        self.started.set()
        assert self.released.wait(30)
        return [{"VQ": float(number)} for number in self.batches[-1]]

    def check_prompts(self, prompts):
        pass


@contextmanager
def serving(app, limits=None):
    """Run an app in a thread and yield its URL."""
    server = make_server(app, limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def running(scorer, **options):
    """Run the service of a scorer in a thread and yield its URL."""
    app = create_app(scorer, token=TOKEN, **options)
    with serving(app, options.get("limits")) as url:
        try:
            yield url
        finally:
            scorer.released.set()


def numbered(*numbers):
    return [torch.full((2, 3, 8, 8), number, dtype=torch.uint8) for number in numbers]


def until(is_true, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def num_waiting(url):
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, timeout=5).text
    return int(dict(line.split() for line in text.splitlines())["reward_waiting"])


@pytest.mark.slow
def test_sixty_waiting_requests_do_not_block_other_routes():
    scorer = HeldScorer()
    with running(scorer) as url, ThreadPoolExecutor(60) as pool:
        answers = [pool.submit(remote(url).score, numbered(i), ["a"], fps=8) for i in range(60)]
        until(lambda: num_waiting(url) == 60, seconds=20)
        start = time.monotonic()
        with httpx.Client(headers={"authorization": f"Bearer {TOKEN}"}, timeout=5) as client:
            for path in ("health", "metrics"):
                assert client.get(f"{url}/{path}").status_code == 200
            assert client.post(f"{url}/check_prompts", json={"prompts": ["a"]}).json() == {
                "problem": None
            }
        assert time.monotonic() - start < 2
        scorer.released.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in answers] == list(range(60))


def test_requests_beyond_the_limit_get_a_retry_after_header():
    scorer = HeldScorer()
    body = b"".join(encode_request(ScoreRequest(numbered(9), ["a"], 8.0)))
    with running(scorer, max_waiting=2) as url, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(remote(url).score, numbered(i), ["a"], fps=8) for i in range(2)]
        until(lambda: num_waiting(url) == 2)
        response = httpx.post(
            f"{url}/score", content=body, headers={"authorization": f"Bearer {TOKEN}"}
        )
        assert response.status_code == 503 and 1 <= int(response.headers["retry-after"]) <= 60
        with pytest.raises(ScorerUnavailable, match="503.*2 requests are already waiting"):
            remote(url).score(numbered(9), ["a"], fps=8)
        patient = pool.submit(remote(url, retries=1).score, numbered(9), ["a"], fps=8)
        time.sleep(0.3)
        scorer.released.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in (*answers, patient)] == [0, 1, 9]
        until(lambda: num_waiting(url) == 0)


def test_rejected_and_aborted_requests_free_their_slot():
    scorer = HeldScorer()
    headers = {"authorization": f"Bearer {TOKEN}"}
    with running(scorer, max_waiting=1, limits=Limits(seconds=0.5)) as url:
        for _ in range(3):
            assert (
                httpx.post(f"{url}/score", content=b"nonsense", headers=headers).status_code == 422
            )
        with half_sent(url):
            until(lambda: num_waiting(url) == 1)
        until(lambda: num_waiting(url) == 0, seconds=0.4)
        with half_sent(url) as slow:
            until(lambda: num_waiting(url) == 1)
            until(lambda: num_waiting(url) == 0, seconds=2)
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")


@contextmanager
def connected(url, sent=b""):
    """Open a connection and send some bytes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
        yield connection


HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


def head_of(length, path="score", token=TOKEN):
    lines = (
        f"POST /{path} HTTP/1.1",
        "host: a",
        f"authorization: Bearer {token}",
        f"content-length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def half_sent(url, path="score"):
    """Open a connection with a request whose body is incomplete."""
    return connected(url, head_of(1000, path) + b"half")


def test_the_problem_of_a_prompt_may_have_any_text():
    class Quotes(HeldScorer):
        def check_prompts(self, prompts):
            raise ValueError("cannot score \ud800")

    with running(Quotes()) as url:
        headers = {"authorization": f"Bearer {TOKEN}"}
        response = httpx.post(f"{url}/check_prompts", json={"prompts": ["a"]}, headers=headers)
        assert response.status_code == 200
        assert response.json()["problem"] == "cannot score \\ud800"


def test_check_prompts_takes_a_slot_and_has_a_lower_size_limit():
    headers = {"authorization": f"Bearer {TOKEN}"}
    with (
        running(HeldScorer(), max_waiting=1, limits=Limits(prompts=2000)) as url,
        half_sent(url, "check_prompts"),
    ):
        until(lambda: num_waiting(url) == 1)
        response = httpx.post(f"{url}/check_prompts", json={"prompts": ["a"]}, headers=headers)
        assert response.status_code == 503 and "retry-after" in response.headers
    with running(HeldScorer(), limits=Limits(prompts=2000)) as url:
        response = httpx.post(
            f"{url}/check_prompts", json={"prompts": ["a" * 2000]}, headers=headers
        )
        assert response.status_code == 413 and "may have at most 2000 bytes" in response.text


def test_slow_bodies_are_dropped_for_a_fast_client():
    scorer = HeldScorer()
    scorer.released.set()
    with (
        running(scorer, max_waiting=2) as url,
        half_sent(url) as oldest,
        half_sent(url, "check_prompts") as other,
    ):
        until(lambda: num_waiting(url) == 2)
        time.sleep(1.2)  # now they are behind by 5 % of the time limit
        assert remote(url).score(numbered(7), ["a"], fps=8)[0].scores == {"VQ": 7.0}
        assert oldest.recv(1000).startswith(b"HTTP/1.1 408")
        other.sendall(b"1" * 996)
        assert other.recv(1000).startswith(b"HTTP/1.1 422")


def test_only_a_body_above_the_minimum_rate_extends_its_deadline():
    limits = Limits(seconds=0.5, rate=100.0)
    with (
        running(HeldScorer(), limits=limits) as url,
        half_sent(url) as trickling,
        half_sent(url) as steady,
    ):
        for _ in range(6):
            time.sleep(0.12)
            steady.sendall(bytes(150))
            if not readable(trickling):
                trickling.sendall(b"1")
        assert trickling.recv(1000).startswith(b"HTTP/1.1 408")
        steady.sendall(bytes(1000 - 4 - 6 * 150))
        assert steady.recv(1000).startswith(b"HTTP/1.1 422")


def readable(connection):
    return bool(select.select([connection], [], [], 0)[0])


def is_dropped(connection):
    try:
        return readable(connection) and connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def test_connections_with_incomplete_headers_are_dropped():
    with (
        running(HeldScorer(), limits=Limits(seconds=1.0)) as url,
        connected(url, b"POST /sc") as new,
    ):
        with connected(url, HEALTH) as used, half_sent(url) as other:
            assert used.recv(1000).startswith(b"HTTP/1.1 200")
            used.sendall(HEALTH[:5])
            new.sendall(b"o")
            assert not is_dropped(new) and not is_dropped(used)
            until(lambda: is_dropped(new) and is_dropped(used), seconds=4)
            assert other.recv(1000).startswith(b"HTTP/1.1 408")


def test_the_longest_idle_connection_is_dropped_beyond_the_limit():
    scorer = HeldScorer()
    with (
        running(scorer, limits=Limits(connections=4)) as url,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as stack,
    ):
        answer = pool.submit(remote(url).score, numbered(3), ["a"], fps=8)
        assert scorer.started.wait(10)
        opened = [stack.enter_context(connected(url, HEALTH))]
        assert opened[0].recv(1000).startswith(b"HTTP/1.1 200")
        opened += [stack.enter_context(connected(url, b"POST /sc")) for _ in range(5)]
        until(lambda: all(map(is_dropped, opened[:3])))
        assert not any(map(is_dropped, opened[3:]))
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        scorer.released.set()
        assert answer.result(10)[0].scores == {"VQ": 3.0}


@contextmanager
def unread(url, request, count):
    """Open a connection that sends requests and reads no answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.settimeout(5)
        connection.connect((host, int(port)))
        connection.sendall(request * count)
        yield connection


def is_healthy(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).json() == {"status": "ok"}
    except httpx.TransportError:
        return False


def num_received(connection):
    """Return the bytes received until the connection is closed or reset."""
    size = 0
    with suppress(ConnectionResetError):
        while data := connection.recv(2**16):
            size += len(data)
    return size


def test_clients_that_read_no_answer_are_dropped():
    with (
        running(HeldScorer(), limits=Limits(connections=2, seconds=1.0)) as url,
        ExitStack() as stack,
    ):
        slow = [stack.enter_context(unread(url, HEALTH, 20_000)) for _ in range(2)]
        until(lambda: is_healthy(url))
        # a client that sends requests ahead gets one answer
        assert max(map(num_received, slow)) < 1000


def test_a_client_that_does_not_read_a_long_answer_is_dropped():
    app = FastAPI()
    app.get("/long")(lambda: StreamingResponse("x" * 10**5 for _ in range(1000)))
    app.get("/health")(lambda: {"status": "ok"})
    with (
        serving(app, Limits(connections=1, seconds=0.5)) as url,
        unread(url, HEALTH.replace(b"health", b"long"), 1),
    ):
        time.sleep(0.2)
        until(lambda: is_healthy(url))


@pytest.mark.parametrize("token, status", [("guess", b"HTTP/1.1 401"), (TOKEN, b"HTTP/1.1 503")])
def test_the_body_of_a_rejected_request_is_not_read(token, status):
    with running(HeldScorer(), max_waiting=1) as url, half_sent(url):
        until(lambda: num_waiting(url) == 1)
        with connected(url, head_of(2**28, token=token)) as connection:
            assert connection.recv(1000).startswith(status)
            with pytest.raises(OSError):
                for _ in range(2**8):
                    connection.sendall(bytes(2**20))


@pytest.mark.system
def test_a_client_with_a_large_request_retries_a_busy_service():
    scorer = HeldScorer()
    large = torch.full((32, 3, 512, 512), 5, dtype=torch.uint8)  # larger than all socket buffers
    with running(scorer, max_waiting=1) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(remote(url).score, numbered(1), ["a"], fps=8)
        assert scorer.started.wait(10)
        with pytest.raises(ScorerUnavailable, match="503.*1 requests are already waiting"):
            remote(url).score([large], ["a"], fps=8)
        with pytest.raises(ScorerUnavailable, match="401"):
            remote(url, token="guess").score([large], ["a"], fps=8)
        patient = pool.submit(remote(url, retries=1).score, [large], ["a"], fps=8)
        time.sleep(0.3)
        scorer.released.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in (first, patient)] == [1, 5]


def test_a_large_request_is_scored_in_batches_and_answered_in_order():
    scorer = HeldScorer()
    scorer.released.set()
    with running(scorer, max_videos=16) as url:
        results = remote(url).score(numbered(*range(40)), ["a"] * 40, fps=8)
    assert [result.scores["VQ"] for result in results] == list(range(40))
    assert [len(batch) for batch in scorer.batches] == [16, 16, 8]


@pytest.mark.parametrize(
    "max_bytes, batches",
    [
        (2**19, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (2**30, [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]),  # rejected requests are halved
    ],
)
def test_videos_above_the_limit_of_a_request_are_scored_in_several(max_bytes, batches):
    scorer = HeldScorer()
    scorer.released.set()
    # 115,200 bytes each
    videos = [torch.full((2, 3, 128, 150), number, dtype=torch.uint8) for number in range(10)]
    with running(scorer, limits=Limits(body=2**19)) as url:
        results = remote(url, max_bytes=max_bytes).score(videos, ["a"] * 10, fps=8)
    assert [result.scores["VQ"] for result in results] == list(
        range(10)
    ) and scorer.batches == batches


def test_a_request_waits_until_there_is_memory_for_its_body():
    scorer = HeldScorer()
    # 196,608 bytes each
    videos = [torch.full((2, 3, 128, 256), number, dtype=torch.uint8) for number in range(3)]
    with (
        running(scorer, limits=Limits(body=2**18, memory=2**18)) as url,
        ThreadPoolExecutor(3) as pool,
    ):
        answers = [pool.submit(remote(url).score, [video], ["a"], fps=8) for video in videos]
        until(lambda: scorer.started.is_set() and num_waiting(url) == 3)
        time.sleep(0.2)
        text = httpx.get(
            f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, timeout=5
        ).text
        assert "reward_requests_total 1\n" in text  # the others were not read
        scorer.released.set()
        assert [answer.result(10)[0].scores["VQ"] for answer in answers] == [0, 1, 2]
    assert len(scorer.batches) == 3


def test_concurrent_requests_share_batches_and_keep_their_order():
    scorer = HeldScorer()
    batcher = Batcher(scorer, max_videos=4, wait=0.2)
    first = batcher.submit(ScoreRequest(numbered(0), ["a"], 8.0))
    assert scorer.started.wait(10)
    others = [
        batcher.submit(ScoreRequest(numbered(*numbers), ["a"] * 3, 8.0))
        for numbers in ((1, 2, 3), (4, 5, 6))
    ]
    scorer.released.set()
    scores = [[video.result(10).scores["VQ"] for video in answer] for answer in (first, *others)]
    batcher.close()
    assert scores == [[0], [1, 2, 3], [4, 5, 6]]
    assert [len(batch) for batch in scorer.batches] == [1, 4, 2]


def test_requests_of_disconnected_clients_are_not_scored():
    scorer = HeldScorer()
    with running(scorer, max_videos=4) as url, ThreadPoolExecutor(3) as pool:
        first = pool.submit(remote(url).score, numbered(1), ["a"], fps=8)
        assert scorer.started.wait(10)
        with pytest.raises(ScorerUnavailable):
            remote(url, timeout=0.5).score(numbered(*range(100, 140)), ["a"] * 40, fps=8)
        last = pool.submit(remote(url).score, numbered(2), ["a"], fps=8)
        until(lambda: num_waiting(url) == 2)
        scorer.released.set()
        assert [answer.result(10)[0].scores["VQ"] for answer in (first, last)] == [1, 2]
    assert scorer.batches == [[1], [2]]


def test_the_rest_of_a_request_is_dropped_when_its_client_disconnects():
    scorer = HeldScorer()
    with running(scorer, max_videos=4) as url:
        with pytest.raises(ScorerUnavailable):
            remote(url, timeout=0.5).score(numbered(*range(12)), ["a"] * 12, fps=8)
        until(lambda: num_waiting(url) == 0)
        scorer.released.set()
        assert remote(url).score(numbered(50), ["a"], fps=8)[0].scores == {"VQ": 50.0}
    assert scorer.batches == [[0, 1, 2, 3], [50]]


def test_waiting_requests_with_equal_frame_rates_are_batched():
    started, released, batches = threading.Event(), threading.Event(), []

    class Slow(MiniatureScorer):
        def score(self, videos, prompts, *, fps):
            batches.append((len(videos), fps))
            started.set()
            assert released.wait(10)
            return [{"VQ": float(len(prompt))} for prompt in prompts]

    batcher = Batcher(Slow("assets/miniature"), max_videos=4, wait=0.05)
    first = batcher.submit(ScoreRequest(CLIP, ["a"], 8.0))
    assert started.wait(10)
    others = [batcher.submit(ScoreRequest(CLIP, ["a" * i], 8.0)) for i in (2, 3)]
    other_rate = batcher.submit(ScoreRequest(CLIP, ["aaaa"], 24.0))
    released.set()
    answers = [video.result(10).scores["VQ"] for (video,) in (first, *others, other_rate)]
    batcher.close()
    assert answers == [1, 2, 3, 4]
    assert batches == [(1, 8.0), (2, 8.0), (1, 24.0)]
