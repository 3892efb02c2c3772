"""The service in this process, around a scorer that the test holds back."""

import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import torch

from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.models.reward_models.rewards import ScorerUnavailable
from hyvideo.models.reward_models.service.connections import make_server
from hyvideo.models.reward_models.service.limits import Limits
from hyvideo.models.reward_models.service.protocol import (
    ScoreRequest,
    encode_request,
)
from hyvideo.models.reward_models.service.server import Batcher, create_app
from tests.models.reward_models.service.test_client import CLIP, TOKEN, remote


class HeldScorer:
    """Scores a video by its first pixel, when it may; remembers what it was given."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.batches = []

    def score(self, videos, prompts, *, fps):
        self.batches.append([int(video[0, 0, 0, 0]) for video in videos])
        self.begun.set()
        assert self.go_on.wait(30)
        return [{"VQ": float(number)} for number in self.batches[-1]]

    def check_prompts(self, prompts):
        pass


@contextmanager
def running(scorer, **options):
    """Address of the real app around a scorer, in a thread."""
    server = make_server(create_app(scorer, name="held", token=TOKEN, **options), options.get("limits"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            scorer.go_on.set()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def numbered(*numbers):
    return [torch.full((2, 3, 8, 8), number, dtype=torch.uint8) for number in numbers]


def until(is_true, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def num_waiting(url):
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, timeout=5).text
    return int(dict(line.split() for line in text.splitlines())["reward_waiting"])


def test_sixty_waiting_requests_hold_up_nothing_else():
    scorer = HeldScorer()
    with running(scorer) as url, ThreadPoolExecutor(60) as pool:
        answers = [pool.submit(remote(url).score, numbered(i), ["a"], fps=8) for i in range(60)]
        until(lambda: num_waiting(url) == 60, seconds=20)
        start = time.monotonic()
        with httpx.Client(headers={"authorization": f"Bearer {TOKEN}"}, timeout=5) as client:
            for path in ("health", "info", "metrics"):
                assert client.get(f"{url}/{path}").status_code == 200
            assert client.post(f"{url}/check_prompts", json={"prompts": ["a"]}).json() == {"problem": None}
        assert time.monotonic() - start < 2
        scorer.go_on.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in answers] == list(range(60))


def test_beyond_the_limit_a_request_is_told_when_to_come_again():
    scorer = HeldScorer()
    body = encode_request(ScoreRequest(numbered(9), ["a"], 8.0))
    with running(scorer, max_waiting=2) as url, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(remote(url).score, numbered(i), ["a"], fps=8) for i in range(2)]
        until(lambda: num_waiting(url) == 2)
        refused = httpx.post(f"{url}/score", content=body, headers={"authorization": f"Bearer {TOKEN}"})
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 60
        with pytest.raises(ScorerUnavailable, match="503.*2 requests are already waiting"):
            remote(url).score(numbered(9), ["a"], fps=8)
        patient = pool.submit(remote(url, retries=1).score, numbered(9), ["a"], fps=8)
        time.sleep(0.3)
        scorer.go_on.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in (*answers, patient)] == [0, 1, 9]
        until(lambda: num_waiting(url) == 0)


def test_a_request_that_was_refused_or_broken_off_gives_its_place_back():
    scorer = HeldScorer()
    headers = {"authorization": f"Bearer {TOKEN}"}
    with running(scorer, max_waiting=1, limits=Limits(seconds=0.5)) as url:
        for _ in range(3):
            assert httpx.post(f"{url}/score", content=b"nonsense", headers=headers).status_code == 422
        with half_sent(url):
            until(lambda: num_waiting(url) == 1)
        until(lambda: num_waiting(url) == 0, seconds=0.4)
        with half_sent(url) as slow:
            until(lambda: num_waiting(url) == 1)
            until(lambda: num_waiting(url) == 0, seconds=2)
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")


@contextmanager
def connected(url, sent=b""):
    """A connection on which some bytes were sent."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(sent)
        yield connection


HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


def head_of(length, path="score", token=TOKEN):
    lines = (f"POST /{path} HTTP/1.1", "host: a", f"authorization: Bearer {token}", f"content-length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


def half_sent(url, path="score"):
    """A connection on which a request's body does not end."""
    return connected(url, head_of(1000, path) + b"half")


def test_prompts_that_do_not_end_take_places_like_videos_and_may_be_less_large():
    headers = {"authorization": f"Bearer {TOKEN}"}
    with running(HeldScorer(), max_waiting=1, limits=Limits(prompts=2000)) as url, half_sent(url, "check_prompts"):
        until(lambda: num_waiting(url) == 1)
        refused = httpx.post(f"{url}/check_prompts", json={"prompts": ["a"]}, headers=headers)
        assert refused.status_code == 503 and "retry-after" in refused.headers
    with running(HeldScorer(), limits=Limits(prompts=2000)) as url:
        refused = httpx.post(f"{url}/check_prompts", json={"prompts": ["a" * 2000]}, headers=headers)
        assert refused.status_code == 413 and "may have at most 2000 bytes" in refused.text


def test_bodies_that_trickle_give_way_to_a_client_at_full_speed():
    scorer = HeldScorer()
    scorer.go_on.set()
    with running(scorer, max_waiting=2) as url, half_sent(url) as oldest, half_sent(url, "check_prompts") as other:
        until(lambda: num_waiting(url) == 2)
        time.sleep(1.2)  # now they are a twentieth of the limit behind
        assert remote(url).score(numbered(7), ["a"], fps=8)[0].scores == {"VQ": 7.0}
        assert oldest.recv(1000).startswith(b"HTTP/1.1 408")
        other.sendall(b"1" * 996)
        assert other.recv(1000).startswith(b"HTTP/1.1 422")


def test_a_byte_now_and_then_does_not_put_a_deadline_off_and_a_steady_stream_does():
    limits = Limits(seconds=0.5, rate=100.0)
    with running(HeldScorer(), limits=limits) as url, half_sent(url) as trickling, half_sent(url) as steady:
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


def test_headers_that_do_not_end_are_dropped_by_a_deadline_also_after_a_request():
    with running(HeldScorer(), limits=Limits(seconds=1.0)) as url, connected(url, b"POST /sc") as new:
        with connected(url, HEALTH) as used, half_sent(url) as other:
            assert used.recv(1000).startswith(b"HTTP/1.1 200")
            used.sendall(HEALTH[:5])
            new.sendall(b"o")
            assert not is_dropped(new) and not is_dropped(used)
            until(lambda: is_dropped(new) and is_dropped(used), seconds=4)
            assert other.recv(1000).startswith(b"HTTP/1.1 408")


def test_beyond_a_number_of_connections_the_one_that_asked_nothing_for_longest_is_dropped():
    scorer = HeldScorer()
    with running(scorer, limits=Limits(connections=4)) as url, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        answer = pool.submit(remote(url).score, numbered(3), ["a"], fps=8)
        assert scorer.begun.wait(10)
        opened = [stack.enter_context(connected(url, HEALTH))]
        assert opened[0].recv(1000).startswith(b"HTTP/1.1 200")
        opened += [stack.enter_context(connected(url, b"POST /sc")) for _ in range(5)]
        until(lambda: all(map(is_dropped, opened[:3])))
        assert not any(map(is_dropped, opened[3:]))
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        scorer.go_on.set()
        assert answer.result(10)[0].scores == {"VQ": 3.0}


@pytest.mark.parametrize("token, status", [("guess", b"HTTP/1.1 401"), (TOKEN, b"HTTP/1.1 503")])
def test_the_body_of_a_refused_request_is_not_read(token, status):
    with running(HeldScorer(), max_waiting=1) as url, half_sent(url):
        until(lambda: num_waiting(url) == 1)
        with connected(url, head_of(2**28, token=token)) as connection:
            assert connection.recv(1000).startswith(status)
            with pytest.raises(OSError):
                for _ in range(2**8):
                    connection.sendall(bytes(2**20))


def test_a_client_with_a_large_request_is_told_that_the_service_is_busy_and_comes_again():
    scorer = HeldScorer()
    large = torch.full((32, 3, 512, 512), 5, dtype=torch.uint8)  # more than all buffers on the way
    with running(scorer, max_waiting=1) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(remote(url).score, numbered(1), ["a"], fps=8)
        assert scorer.begun.wait(10)
        with pytest.raises(ScorerUnavailable, match="503.*1 requests are already waiting"):
            remote(url).score([large], ["a"], fps=8)
        with pytest.raises(ScorerUnavailable, match="401"):
            remote(url, token="guess").score([large], ["a"], fps=8)
        patient = pool.submit(remote(url, retries=1).score, [large], ["a"], fps=8)
        time.sleep(0.3)
        scorer.go_on.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in (first, patient)] == [1, 5]


def test_a_large_request_is_scored_in_batches_and_answered_in_order():
    scorer = HeldScorer()
    scorer.go_on.set()
    with running(scorer, max_videos=16) as url:
        results = remote(url).score(numbered(*range(40)), ["a"] * 40, fps=8)
    assert [result.scores["VQ"] for result in results] == list(range(40))
    assert [len(batch) for batch in scorer.batches] == [16, 16, 8]


def test_requests_that_arrive_together_share_full_batches_and_keep_their_order():
    scorer = HeldScorer()
    batcher = Batcher(scorer, max_videos=4, wait=0.2)
    first = batcher.submit(ScoreRequest(numbered(0), ["a"], 8.0))
    assert scorer.begun.wait(10)
    others = [batcher.submit(ScoreRequest(numbered(*numbers), ["a"] * 3, 8.0)) for numbers in ((1, 2, 3), (4, 5, 6))]
    scorer.go_on.set()
    scores = [[video.result(10).scores["VQ"] for video in answer] for answer in (first, *others)]
    batcher.close()
    assert scores == [[0], [1, 2, 3], [4, 5, 6]]
    assert [len(batch) for batch in scorer.batches] == [1, 4, 2]


def test_what_a_client_that_has_gone_had_asked_for_is_not_scored():
    scorer = HeldScorer()
    with running(scorer, max_videos=4) as url, ThreadPoolExecutor(3) as pool:
        first = pool.submit(remote(url).score, numbered(1), ["a"], fps=8)
        assert scorer.begun.wait(10)
        with pytest.raises(ScorerUnavailable):
            remote(url, timeout=0.5).score(numbered(*range(100, 140)), ["a"] * 40, fps=8)
        last = pool.submit(remote(url).score, numbered(2), ["a"], fps=8)
        until(lambda: num_waiting(url) == 2)
        scorer.go_on.set()
        assert [answer.result(10)[0].scores["VQ"] for answer in (first, last)] == [1, 2]
    assert scorer.batches == [[1], [2]]


def test_the_rest_of_a_request_is_dropped_when_its_client_goes_between_batches():
    scorer = HeldScorer()
    with running(scorer, max_videos=4) as url:
        with pytest.raises(ScorerUnavailable):
            remote(url, timeout=0.5).score(numbered(*range(12)), ["a"] * 12, fps=8)
        until(lambda: num_waiting(url) == 0)
        scorer.go_on.set()
        assert remote(url).score(numbered(50), ["a"], fps=8)[0].scores == {"VQ": 50.0}
    assert scorer.batches == [[0, 1, 2, 3], [50]]


def test_waiting_requests_are_scored_together_if_their_rates_agree():
    begun, go_on, batches = threading.Event(), threading.Event(), []

    class Slow(MiniatureScorer):
        def score(self, videos, prompts, *, fps):
            batches.append((len(videos), fps))
            begun.set()
            assert go_on.wait(10)
            return [{"VQ": float(len(prompt))} for prompt in prompts]

    batcher = Batcher(Slow("assets/miniature"), max_videos=4, wait=0.05)
    first = batcher.submit(ScoreRequest(CLIP, ["a"], 8.0))
    assert begun.wait(10)
    others = [batcher.submit(ScoreRequest(CLIP, ["a" * i], 8.0)) for i in (2, 3)]
    other_rate = batcher.submit(ScoreRequest(CLIP, ["aaaa"], 24.0))
    go_on.set()
    answers = [video.result(10).scores["VQ"] for (video,) in (first, *others, other_rate)]
    batcher.close()
    assert answers == [1, 2, 3, 4]
    assert batches == [(1, 8.0), (2, 8.0), (1, 24.0)]
