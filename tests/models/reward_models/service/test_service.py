"""The reward service in a process of its own, and everything that can go wrong between it and its client."""

import http.server
import io
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction

import av
import httpx
import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from safetensors.torch import save

from hyvideo.data.videos import read_video, to_uint8, write_video
from hyvideo.miniature import world
from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.models.reward_models.async_scorer import AsyncScorer
from hyvideo.models.reward_models.rewards import ScoreResult, ScorerUnavailable
from hyvideo.models.reward_models.service import protocol
from hyvideo.models.reward_models.service.client import RemoteScorer, RequestRefused
from hyvideo.models.reward_models.service.protocol import (
    BadRequest,
    Limits,
    ScoreRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)
from hyvideo.models.reward_models.service.server import Batcher, create_app
from tests.forked import ROOT, python

TOKEN = "a-secret"


def clips(count):
    from hyvideo.data.randomness import generator

    videos = world.render(world.LABELS[:count], generator(0, "clips"))
    return list(to_uint8(videos).transpose(1, 2)), list(world.CAPTIONS[:count])


@pytest.fixture(scope="module")
def service():
    """Address and process of the real service with a token."""
    command = [sys.executable, "-m", "scripts.reward_server", "--reward_model", "miniature", "--model_path"]
    environment = os.environ | {"REWARD_SERVER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "assets/miniature", "--port", "0", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:"), process.stderr.read()
    yield line.split()[-1]
    process.terminate()
    assert process.wait(20) in (0, -15)


def remote(*urls, **options):
    options = {"token": TOKEN, "timeout": 20.0, "retries": 0, "backoff": 0.01, "cooldown": 60.0} | options
    return RemoteScorer(urls, **options)


# --- the real service ----------------------------------------------------------------------------


def test_a_service_gives_the_scores_of_its_scorer(service):
    videos, prompts = clips(5)
    results = remote(service).score(videos, prompts, fps=8)
    expected = MiniatureScorer("assets/miniature").score(videos, prompts, fps=8)
    assert [result.scores for result in results] == expected


def test_many_clients_are_served(service):
    videos, prompts = clips(8)
    expected = MiniatureScorer("assets/miniature").score(videos, prompts, fps=8)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda i: remote(service).score(videos[i : i + 1], prompts[i : i + 1], fps=8), range(8))
    assert [answer[0].scores for answer in answers] == [pytest.approx(one) for one in expected]
    figures = httpx.get(f"{service}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    counts = dict(line.split() for line in figures.splitlines())
    assert int(counts["reward_requests_total"]) >= 8 and int(counts["reward_failures_total"]) >= 0


def test_prompts_are_checked_by_the_services_scorer(service):
    remote(service).check_prompts(["a red circle moves up"])
    with pytest.raises(ValueError, match="purple"):
        remote(service).check_prompts(["a purple circle moves up"])


def test_a_prompt_that_fails_costs_only_itself(service):
    videos, prompts = clips(2)
    first, second = remote(service).score(videos, ["a purple cat", prompts[1]], fps=8)
    assert first.reason and second.scores and not first.scores


def test_without_the_token_nothing_is_scored(service):
    videos, prompts = clips(1)
    with pytest.raises(ScorerUnavailable, match="401"):
        remote(service, token="guess").score(videos, prompts, fps=8)
    assert httpx.get(f"{service}/health").json() == {"status": "ok"}
    assert httpx.get(f"{service}/metrics").status_code == 401


def test_an_address_beyond_this_machine_needs_a_token(tmp_path):
    command = [python(), "-m", "scripts.reward_server", "--host", "0.0.0.0", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "REWARD_SERVER_TOKEN"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert result.returncode == 2 and "needs a token" in result.stderr and "Traceback" not in result.stderr


def test_hostile_bodies_are_refused_and_the_service_lives_on(service):
    rng = random.Random(0)
    videos, prompts = clips(1)
    good = encode_request(ScoreRequest(videos, prompts, 8.0))
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(headers=headers, timeout=20) as client:
        for _ in range(300):
            body = bytearray(good[: rng.randrange(len(good))] if rng.random() < 0.5 else good)
            for _ in range(rng.randrange(1, 6)):
                if body:
                    body[rng.randrange(min(len(body), 200))] = rng.randrange(256)
            response = client.post(f"{service}/score", content=bytes(body))
            assert response.status_code in (200, 413, 422), response.text
            assert "Traceback" not in response.text
    assert remote(service).score(videos, prompts, fps=8)[0].scores


LONE_SURROGATE = '"half a pair: \\ud800"'  # as JSON; Python reads it as a string that has no UTF-8


def hostile_header(metadata, name="video.0"):
    """A request of one black 1 x 1 frame whose header is written by hand."""
    entry = f'"{name}": {{"dtype": "U8", "shape": [1, 3, 1, 1], "data_offsets": [0, 3]}}'
    header = f'{{"__metadata__": {metadata}, {entry}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(3)


@pytest.mark.parametrize(
    "path, body",
    [
        ("score", encode_request(ScoreRequest([torch.zeros(1, 3, 8, 8, dtype=torch.uint8)], ["\ud800"], 8.0))),
        ("score", hostile_header(f'{{"prompts": [{LONE_SURROGATE}], "fps": "8"}}')),
        ("score", hostile_header(f'{{"prompts": {LONE_SURROGATE}, "fps": "8"}}')),
        ("score", hostile_header(f'{{"prompts": "[\\"a\\"]", "fps": {LONE_SURROGATE}}}')),
        ("score", hostile_header('{"prompts": "[\\"a\\"]", "fps": "8"}', name="\\ud800")),
        ("score", hostile_header('{"prompts": "[\\"a\\"]", "fps": 1' + "0" * 400 + "}")),
        ("score", hostile_header('{"prompts": "' + "[" * 5000 + '", "fps": "8"}')),
        ("check_prompts", f'{{"prompts": [{LONE_SURROGATE}]}}'.encode()),
        ("check_prompts", f"[{LONE_SURROGATE}]".encode()),
        ("check_prompts", b'{"prompts": ["\xed\xa0\x80"]}'),
        ("check_prompts", b"[" * 100_000),
        ("check_prompts", b"1" * 5000),
    ],
)
def test_what_is_no_text_or_no_number_is_refused(service, path, body):
    response = httpx.post(f"{service}/{path}", content=body, headers={"authorization": f"Bearer {TOKEN}"}, timeout=20)
    assert response.status_code in (413, 422), response.text


def test_half_a_surrogate_pair_is_a_clear_error_to_the_client(service):
    with pytest.raises(ValueError, match="half a surrogate pair is in prompt 1"):
        remote(service).check_prompts(["a red circle moves up", "\ud800"])
    with pytest.raises(RequestRefused, match="half a surrogate pair is in prompt 0"):
        remote(service).score(CLIP, ["\ud800"], fps=8)


def test_a_run_can_be_rewarded_by_the_service(service):
    videos, prompts = clips(3)
    async_scorer = AsyncScorer({"miniature": remote(service)}, {"VQ": 0.5, "MQ": 0.5, "TA": 1.0})
    rewards = async_scorer.score([videos[0], None, videos[2]], prompts, fps=8)
    async_scorer.close()
    assert [reward.is_missing for reward in rewards] == [False, True, False]


# --- services that misbehave ---------------------------------------------------------------------


class Misbehaving:
    """An HTTP server in a thread that answers as it is told, and counts."""

    def __init__(self, answer, status=200, delay=0.0, drip=False, cut=False, headers=None):
        owner = self
        self.answer, self.status, self.calls = answer, status, 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                owner.calls += 1
                if cut:
                    self.connection.close()
                    return
                self.rfile.read(int(self.headers["content-length"]))
                time.sleep(delay)
                content = owner.answer if isinstance(owner.answer, bytes) else json.dumps(owner.answer).encode()
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
    for one in servers:
        one.server.shutdown()
        one.server.server_close()


GOOD = {"scores": [{"VQ": 1.0}], "reasons": [None]}
CLIP = [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)]


@pytest.mark.parametrize(
    "answer, options, said",
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
        (GOOD, {"delay": 3.0}, "did not end within"),
        (GOOD, {"drip": True}, "did not end within"),
        (GOOD, {"cut": True}, "Error"),
    ],
)
def test_nonsense_and_slowness_make_the_service_unavailable(misbehaving, answer, options, said):
    server = misbehaving(answer, **options)
    start = time.monotonic()
    with pytest.raises(ScorerUnavailable, match=said):
        remote(server.url, timeout=1.0).score(CLIP, ["a"], fps=8)
    assert time.monotonic() - start < 5


class Raw:
    """A TCP server in a thread that reads what is there and then sends bytes at its own pace."""

    def __init__(self, content, *, pause):
        self.left_after = None  # seconds after which the client was gone
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


@pytest.mark.parametrize("content", [ANSWER, b"HTTP/1.1 100 Continue\r\n\r\n" * 100], ids=["headers", "informational"])
def test_headers_byte_by_byte_do_not_stretch_the_timeout(content):
    num_threads = threading.active_count()
    server = Raw(content, pause=0.1)
    start = time.monotonic()
    with pytest.raises(ScorerUnavailable, match="did not end within 1.0 s"):
        remote(server.url, timeout=1.0).score(CLIP, ["a"], fps=8)
    assert time.monotonic() - start < 1.5
    while server.left_after is None and time.monotonic() - start < 5:
        time.sleep(0.02)
    assert server.left_after < 2  # the connection was closed
    time.sleep(0.05)
    assert threading.active_count() <= num_threads


def test_a_service_that_reads_nothing_does_not_stretch_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, nobody takes them
        start = time.monotonic()
        with pytest.raises(ScorerUnavailable, match="did not end within 1.0 s"):
            large = torch.zeros(64, 3, 512, 512, dtype=torch.uint8)
            remote(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=1.0).score([large], ["a"], fps=8)
        assert time.monotonic() - start < 2


def test_a_name_that_is_looked_up_slowly_does_not_stretch_the_timeout(monkeypatch):
    gone_on = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gone_on.wait(10) and [])
    start = time.monotonic()
    with pytest.raises(ScorerUnavailable, match="did not end within 1.0 s"):
        remote("http://reward.invalid", timeout=1.0).score(CLIP, ["a"], fps=8)
    gone_on.set()
    assert time.monotonic() - start < 2


def test_a_connection_is_left_when_its_answer_is_too_long(misbehaving):
    with pytest.raises(ScorerUnavailable, match="longer than 16777216 bytes"):
        remote(misbehaving(b" " * (2**24 + 1)).url).score(CLIP, ["a"], fps=8)


@pytest.mark.parametrize("text", [b'{"scores": [{"VQ": NaN}]}', b'{"scores": [{"VQ": null}]}'])
def test_a_value_that_is_no_number_is_missing(misbehaving, text):
    async_scorer = AsyncScorer({"remote": remote(misbehaving(text).url)}, {"VQ": 1.0})
    (reward,) = async_scorer.score(CLIP, ["a"], fps=8)
    async_scorer.close()
    assert reward.is_missing and math.isnan(reward.total) and reward.reason == "no finite score for VQ"


def test_a_service_that_is_down_is_missing_rewards_and_no_hang():
    start = time.monotonic()
    async_scorer = AsyncScorer({"remote": remote("http://127.0.0.1:9", retries=1)}, {"VQ": 1.0}, retries=3)
    rewards = async_scorer.score(CLIP * 4, ["a"] * 4, fps=8)
    async_scorer.close()
    assert all(reward.is_missing and "no reward service gave an answer" in reward.reason for reward in rewards)
    assert time.monotonic() - start < 5


def test_another_service_takes_over_and_the_dead_one_comes_back(misbehaving):
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


def test_a_refusal_is_not_tried_elsewhere(misbehaving):
    first, second = misbehaving({"detail": "too many"}, status=413), misbehaving({"detail": "too many"}, status=413)
    with pytest.raises(RequestRefused, match="413.*too many"):
        remote(first.url, second.url).score(CLIP, ["a"], fps=8)
    assert first.calls + second.calls == 1


def test_no_service_at_the_start_of_a_run_is_a_clear_error():
    with pytest.raises(ValueError, match="no reward service gave an answer .http://127.0.0.1:9"):
        remote("http://127.0.0.1:9").check_prompts(["a"])
    with pytest.raises(ValueError, match="has an address such as"):
        RemoteScorer(["127.0.0.1:8000"])


# --- a service in this process, whose scorer the test holds back --------------------------------


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
    app = create_app(scorer, name="held", token=TOKEN, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
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
        with pytest.raises(ScorerUnavailable, match="503.*2 requests are waiting"):
            remote(url).score(numbered(9), ["a"], fps=8)
        patient = pool.submit(remote(url, retries=1).score, numbered(9), ["a"], fps=8)
        time.sleep(0.3)
        scorer.go_on.set()
        assert [answer.result(20)[0].scores["VQ"] for answer in (*answers, patient)] == [0, 1, 9]
        until(lambda: num_waiting(url) == 0)


def test_a_busy_service_is_not_left_out_for_long(misbehaving):
    busy = misbehaving({"detail": "full"}, status=503, headers={"retry-after": "1"})
    scorer = remote(busy.url, misbehaving(GOOD, status=500).url, retries=1, cooldown=60.0)
    threading.Timer(0.5, setattr, (busy, "status", 200)).start()
    busy.answer = GOOD
    start = time.monotonic()
    assert scorer.score(CLIP, ["a"], fps=8)[0].scores == {"VQ": 1.0}
    assert 1 <= time.monotonic() - start < 3 and busy.calls == 2


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
def half_sent(url):
    """A connection on which a request's body does not end."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        head = f"POST /score HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 1000"
        connection.sendall(f"{head}\r\n\r\nhalf".encode())
        yield connection


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
    scores = [[result.scores["VQ"] for result in answer.result(10)] for answer in (first, *others)]
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


@pytest.mark.parametrize("option", ["--max_videos", "--max_waiting"])
def test_counts_below_one_are_refused_at_the_start(option):
    command = [python(), "-m", "scripts.reward_server", "--reward_model", "miniature", "--model_path"]
    command += ["assets/miniature", "--device", "cpu", "--port", "0", option, "0"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 2 and f"{option[2:]} must be at least 1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_said_before_the_scorer_is_read():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [python(), "-m", "scripts.reward_server", "--model_path", "nowhere", "--port"]
        command += [str(taken.getsockname()[1])]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 2 and "cannot listen on 127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_service_can_listen_on_ipv6():
    from scripts.reward_server import bound

    try:
        own = bound("::1", 0)
    except OSError as error:
        assert "family" not in str(error), error
        pytest.skip("this machine has no ::1")
    with own:
        assert own.family == socket.AF_INET6


# --- the wire ------------------------------------------------------------------------------------


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


def test_the_service_refuses_a_huge_film(service, tmp_path):
    body = films_request(film(tmp_path / "v.mp4", [64] * 1025))
    response = httpx.post(f"{service}/score", content=body, headers={"authorization": f"Bearer {TOKEN}"}, timeout=20)
    assert response.status_code == 413 and "1024 frames" in response.text


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
    good = json.dumps(GOOD).encode()
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


@pytest.mark.parametrize("answer", [b"[" * 10**5, b"\xff", b"[]", b'{"problem": 1}', b"1" * 5000])
def test_nonsense_about_prompts_is_a_service_that_is_not_there(misbehaving, answer):
    with pytest.raises(ValueError, match="no reward service gave an answer"):
        remote(misbehaving(answer).url).check_prompts(["a"])


def test_a_problem_with_a_prompt_can_be_printed(misbehaving):
    with pytest.raises(ValueError) as caught:
        remote(misbehaving(b'{"problem": "\\ud800 is wrong"}').url).check_prompts(["a"])
    assert str(caught.value) == "\\ud800 is wrong"


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
    answers = [future.result(10)[0].scores["VQ"] for future in (first, *others, other_rate)]
    batcher.close()
    assert answers == [1, 2, 3, 4]
    assert batches == [(1, 8.0), (2, 8.0), (1, 24.0)]
