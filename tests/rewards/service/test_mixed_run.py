"""A run with a local scorer and one behind a service in another process."""

import json
import os
import subprocess
from contextlib import contextmanager

import pytest
import torch

from hyvideo.distributed.mesh import Mesh
from hyvideo.trainer import Trainer
from tests.forked import ROOT, python

TOKEN = "a-secret"
REWARD = """
def redness(videos, prompts, fps, offset=0.0):
    return [offset + float(video[:, 0].float().mean()) / 255 for video in videos]
"""
LOCAL = {"name": "miniature", "weight": {"VQ": 0.25, "MQ": 0.0, "TA": 1.5}}
WEIGHT = {"redness": -0.375}


@contextmanager
def served(scorer, **options):
    """Start the service of a scorer and yield its URL."""
    command = [python(), "-m", "scripts.reward_server", "--reward_model", scorer]
    command += ["--reward_config", json.dumps({scorer: options}), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"REWARD_SERVER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(20)


def train(config, entry, folder, max_steps=2):
    """Train with the local scorer and another entry, and return the trainer."""
    config = config.with_settings(
        reward_model=[LOCAL, entry],
        output_dir=str(folder),
        max_steps=max_steps,
        log_video_interval=1,
        save_interval=1,
    )
    trainer = Trainer(config, Mesh(rank=0, world_size=1, sp_size=1), torch.device("cpu"))
    trainer.train()
    return trainer


def numbers(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {name: value for name, value in line.items() if not name.startswith(("time", "memory"))}
        for line in lines
    ]
    return kept


def remote(url):
    return {"name": "remote", "weight": WEIGHT, "options": {"url": url}}


@pytest.mark.system
def test_a_run_with_a_service_equals_the_run_with_its_scorer(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_SERVER_TOKEN", TOKEN)
    (tmp_path / "mine.py").write_text(REWARD)
    function = f"{tmp_path}/mine.py:redness"
    with served(function, offset=0.5) as url:
        train(tiny_config, remote(url), tmp_path / "remote")
    local = {"name": function, "weight": WEIGHT, "options": {"offset": 0.5}}
    train(tiny_config, local, tmp_path / "local")
    assert numbers(tmp_path / "remote") == numbers(tmp_path / "local")
    videos = json.loads((tmp_path / "remote/rollouts/000002/scores.json").read_text())
    assert len({video["redness"] for video in videos}) == len(videos) == 8
    for video in videos:
        expected = 0.25 * video["VQ"] + 1.5 * video["TA"] - 0.375 * video["redness"]
        assert video["reward"] == pytest.approx(expected)
        assert video["MQ"] != 0 and video["redness"] > 0.5


@pytest.mark.system
def test_a_resumed_run_accepts_another_address_and_refuses_another_reward_model(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setenv("REWARD_SERVER_TOKEN", TOKEN)
    (tmp_path / "mine.py").write_text(REWARD)
    function = f"{tmp_path}/mine.py:redness"
    run = tmp_path / "run"
    with served(function, offset=0.5) as first, served(function, offset=0.5) as second:
        assert first != second
        train(tiny_config, remote(first), run, max_steps=1)
        assert train(tiny_config, remote(second), run, max_steps=2).iteration == 2
    with served(function, offset=0.25) as third:
        with pytest.raises(ValueError, match="reward_model/remote"):
            train(tiny_config, remote(third), run, max_steps=3)


@pytest.mark.system
def test_a_run_whose_service_is_away_does_not_start(tiny_config, tmp_path):
    with pytest.raises(ValueError, match="no reward service answered.*127.0.0.1:9"):
        train(tiny_config, remote("http://127.0.0.1:9"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
