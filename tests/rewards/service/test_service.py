"""Tests of the reward service in a separate process, and of its program."""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hyvideo.data.videos import to_uint8
from hyvideo.miniature import world
from hyvideo.miniature.reward import MiniatureScorer
from hyvideo.rewards.identity import scorer_identity
from hyvideo.rewards.service.protocol import encode_request
from scripts import reward_server
from tests.forked import python
from tests.rewards.service.test_client import TOKEN, remote

ROOT = Path(__file__).parents[3]


def clips(count):
    from hyvideo.data.randomness import generator

    videos = world.render(world.LABELS[:count], generator(0, "clips"))
    return list(to_uint8(videos).transpose(1, 2)), list(world.CAPTIONS[:count])


@pytest.fixture(scope="module")
def service():
    """Start the service with a token and yield its URL."""
    command = [
        python(),
        "-m",
        "scripts.reward_server",
        "--reward_model",
        "miniature",
        "--pretrained_model_root",
    ]
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


@pytest.mark.system
def test_the_service_sends_the_identity_of_its_scorer(service):
    scorer = remote(service)
    scorer.check_prompts([world.CAPTIONS[0]])
    assert scorer.identity == scorer_identity("miniature", "assets/miniature", {})


@pytest.mark.system
def test_the_service_returns_the_scores_of_its_scorer(service):
    videos, prompts = clips(5)
    results = remote(service).score(videos, prompts, fps=8)
    expected = MiniatureScorer("assets/miniature").score(videos, prompts, fps=8)
    assert [result.scores for result in results] == expected


@pytest.mark.system
def test_concurrent_clients_are_served(service):
    videos, prompts = clips(8)
    expected = MiniatureScorer("assets/miniature").score(videos, prompts, fps=8)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda i: remote(service).score(videos[i : i + 1], prompts[i : i + 1], fps=8), range(8)
        )
    assert [answer[0].scores for answer in answers] == [
        pytest.approx(scores) for scores in expected
    ]


@pytest.mark.system
def test_corrupted_bodies_are_rejected_and_the_service_keeps_running(service):
    rng = random.Random(0)
    videos, prompts = clips(1)
    good = encode_request(videos, prompts, 8.0)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(headers=headers, timeout=20) as client:
        for _ in range(60):
            body = bytearray(good[: rng.randrange(len(good))] if rng.random() < 0.5 else good)
            for _ in range(rng.randrange(1, 6)):
                if body:
                    body[rng.randrange(min(len(body), 200))] = rng.randrange(256)
            response = client.post(f"{service}/score", content=bytes(body))
            assert response.status_code in (200, 413, 422), response.text
            assert "Traceback" not in response.text
    assert remote(service).score(videos, prompts, fps=8)[0].scores


@pytest.fixture
def usage_error(monkeypatch, capsys):
    """Return a function that runs the program, which must exit with code 2, and returns its
    message.
    """

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["reward_server", *flags])
        with pytest.raises(SystemExit) as stopped:
            reward_server.main()
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_a_non_local_address_needs_a_token(usage_error, monkeypatch):
    monkeypatch.delenv("REWARD_SERVER_TOKEN", raising=False)
    assert "token" in usage_error("--host", "0.0.0.0", "--port", "0")
