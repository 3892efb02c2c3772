"""The reward service: access, limits, batches and waiting requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from fastapi.testclient import TestClient

from hyvideo.files.http_guard import listen, make_server
from hyvideo.rewards.rewards import Scorer
from hyvideo.rewards.service import server
from hyvideo.rewards.service.protocol import encode_request
from hyvideo.rewards.service.server import create_app
from tests.rewards.service.test_client import CLIP, remote

BODY = encode_request(CLIP, ["a"], 8.0)


class Level(Scorer):
    """Scorer of the first gray level, which waits until it is released."""

    dimensions = ("level",)

    def __init__(self):
        self.batches = []
        self.released = threading.Event()
        self.released.set()

    def score(self, videos, prompts, *, fps):
        self.batches.append(len(videos))
        assert self.released.wait(10)
        if "dark" in prompts:
            raise RuntimeError("too dark")
        return [{"level": video[0, 0, 0, 0].item()} for video in videos]

    def check_prompts(self, prompts):
        if "rude" in prompts:
            raise ValueError("a \ud800 word")


@pytest.fixture
def client():
    """Return a function that makes a client of a service."""

    def make(scorer=None, base_url="http://127.0.0.1:8000", **options):
        return TestClient(create_app(scorer or Level(), **options), base_url=base_url)

    return make


@pytest.fixture
def served():
    """Return a function that serves a scorer in a thread and returns the URL."""
    running = []

    def serve(scorer, **options):
        listener, url = listen("127.0.0.1", 0)
        running.append((make_server(create_app(scorer, **options)), listener))
        thread = threading.Thread(target=running[-1][0].run, kwargs={"sockets": [listener]})
        thread.start()
        running[-1] += (thread,)
        return url

    yield serve
    for running_server, listener, thread in running:
        running_server.should_exit = True
        thread.join(10)
        listener.close()


def test_a_token_is_needed_except_for_health(client):
    guarded = client(token="right", base_url="http://any.name")
    assert guarded.get("/health").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
        assert guarded.post("/score", content=BODY, headers=headers).status_code == 401
    headers = {"authorization": "Bearer right"}
    assert guarded.post("/score", content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host, status",
    [("localhost:8000", 200), ("[::1]:8000", 200), ("evil.example", 403), ("[", 403)],
)
def test_without_a_token_only_local_names_are_served(client, host, status):
    assert client().post("/score", content=BODY, headers={"host": host}).status_code == status


def test_a_body_that_is_too_large_or_has_no_length_is_rejected_before_it_is_read(
    client, monkeypatch
):
    monkeypatch.setattr(server, "MAX_BYTES", len(BODY))
    assert client().post("/score", content=BODY).status_code == 200
    assert client().post("/score", content=BODY + b" ").status_code == 413
    assert client().post("/score", content=iter([BODY])).status_code == 413


@pytest.mark.parametrize(
    "body",
    [b"no safetensors", encode_request(CLIP, ["a", "b"], 8.0)],
)
def test_invalid_requests_are_rejected(client, body):
    assert client().post("/score", content=body).status_code == 422


def test_a_large_request_is_scored_in_batches_and_answered_in_order(client):
    scorer = Level()
    videos = [torch.full((2, 3, 8, 8), level, dtype=torch.uint8) for level in range(5)]
    body = encode_request(videos, ["a"] * 5, 8.0)
    answer = client(scorer, max_videos=2, identity="mine").post("/score", content=body).json()
    assert [row["level"] for row in answer["scores"]] == [0, 1, 2, 3, 4]
    assert scorer.batches == [2, 2, 1] and answer["identity"] == "mine"


def test_a_video_that_fails_does_not_affect_others(client):
    body = encode_request(CLIP * 2, ["dark", "a"], 8.0)
    answer = client().post("/score", content=body).json()
    assert answer["scores"] == [{}, {"level": 0.0}]
    assert "too dark" in answer["reasons"][0] and answer["reasons"][1] is None


def test_requests_of_clients_that_left_are_not_scored(served):
    scorer = Level()
    scorer.released.clear()
    url = served(scorer)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{url}/score", content=BODY, timeout=10)
        while not scorer.batches:
            pass
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/score", content=BODY, timeout=0.3)
        scorer.released.set()
        assert first.result().status_code == 200
    remote(url).score(CLIP, ["a"], fps=8)
    assert scorer.batches == [1, 1]
