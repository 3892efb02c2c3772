"""The simulated rater of examples/simulated_study.py: noisy answers, and pairs that objective dpo
reads.
"""

import json
import math
import subprocess

import pytest
import torch

from examples import simulated_study
from examples.simulated_study import keep, rate
from hyvideo.data.examples import read_examples
from hyvideo.data.pairs import read_ratings
from hyvideo.data.videos import write_video
from hyvideo.files.files import ROOT
from hyvideo.miniature import world
from hyvideo.ratings import improvement, reward_training
from scripts import improve


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


def test_the_better_half_is_kept_but_for_the_errors():
    videos = {f"{number}.mp4": float(number) for number in range(1000)}
    rewards = {"p": videos, "q": {"a.mp4": 0.2, "b.mp4": 0.1, "c.mp4": 0.3}}
    kept = keep(rewards, 0.0, seed=0)
    assert [name for name in videos if kept[name]] == list(videos)[500:]
    assert [kept[name] for name in rewards["q"]] == [True, False, True]
    wrong = keep(rewards, 0.1, seed=0)
    assert 70 < sum(wrong[name] != kept[name] for name in videos) < 130
    assert wrong == keep(rewards, 0.1, seed=0) != keep(rewards, 0.1, seed=1)


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


@pytest.mark.system
def test_improve_trains_on_the_videos_that_a_person_keeps(
    tmp_path, exit_code, forked_programs, monkeypatch
):
    here = tmp_path / "all/round1"
    steps = []

    def run(command):
        words = list(map(str, command))
        steps.append(words[1:3])
        if "scripts.rate" in words:  # all videos are answered before, so that no page is served
            flags = ["--keep", "true", "--errors", 0, "--output_dir", here / "rated"]
            assert exit_code(simulated_study.main, here / "videos", *flags) == 0
        return subprocess.run(words, cwd=ROOT).returncode

    monkeypatch.setattr(improvement, "run", run)
    prompts = tmp_path / "prompts.csv"
    prompts.write_text(f"prompt\n{world.CAPTIONS[0]}\n{world.CAPTIONS[1]}\n")
    words = ["--config", "configs/miniature_sft.yaml", "--prompts_csv", prompts]
    words += ["--improve_dir", tmp_path / "all", "--num_videos", 2, "--rate", "true"]
    words += ["--max_steps", 1, "--batch_size", 2, "--mini_batch_size_per_update", 2]
    words += ["--valid_video_csv", "", "--num_threads", 1]
    assert exit_code(improve.main, *words) == 0
    assert len(steps) == 3 and steps[1] == ["-m", "scripts.rate"]
    assert len(read_examples([str(here / "rated/videos.csv")], 1.0)) == 2
    assert (here / "run/checkpoints/000001").is_dir()
