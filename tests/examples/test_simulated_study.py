"""The simulated rater of examples/simulated_study.py: noisy answers, and pairs that objective dpo
reads.
"""

import json
import math

import pytest
import torch

from examples import simulated_study
from examples.simulated_study import rate
from hyvideo.data.pairs import read_ratings
from hyvideo.data.videos import write_video
from hyvideo.miniature import world
from studies import reward_training


def test_the_better_video_wins_as_often_as_the_logistic_says():
    rewards = {f"prompt {number}": {"a.mp4": 1.0, "b.mp4": 1.1} for number in range(2000)}
    rated = rate(rewards, 2000, seed=0)
    better = [row[1 if row[3] == "first" else 2] == "b.mp4" for row in rated]
    expected = 1 / (1 + math.exp(-1))
    assert sum(better) / 2000 == pytest.approx(
        expected, abs=3 * math.sqrt(expected * (1 - expected) / 2000)
    )
    first = sum(row[1] == "b.mp4" for row in rated)
    assert 900 < first < 1100  # sides are random
    assert rated == rate(rewards, 2000, seed=0) != rate(rewards, 2000, seed=1)


def test_the_program_rates_videos_of_generate(tmp_path, exit_code):
    caption = world.CAPTIONS[0]
    clean = (torch.arange(9 * 3 * 32 * 32) % 251).reshape(9, 3, 32, 32).to(torch.uint8)
    for number, video in enumerate((clean, 255 - clean)):
        write_video(tmp_path / f"{number:04d}.mp4", video, fps=8)
        (tmp_path / f"{number:04d}.json").write_text(json.dumps({"prompt": caption}))
    assert exit_code(simulated_study.main, tmp_path, "--pairs", 1) == 0
    (rating,) = read_ratings(tmp_path / "pairs.csv")
    (pair,) = reward_training.read_pairs(tmp_path / "pairs.csv", [simulated_study.DIMENSION])
    assert set(pair.videos) == set(rating.videos)
    assert rating.request.prompt == caption and {video.name for video in rating.videos} == {
        "0000.mp4",
        "0001.mp4",
    }
