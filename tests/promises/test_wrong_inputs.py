"""Promises 9 and 11: wrong settings and custom code are named in one sentence with exit code 2, and a
score that is missing costs that reward only.

Weights: test_weights_from_outside.py. Files: test_files_from_outside.py.
"""

import json
import subprocess

import pytest

from tests.forked import ROOT, python

pytestmark = pytest.mark.system
MISSING = """
from zlib import crc32

def hash_of(prompt):
    return crc32(prompt.encode())

def brightness(videos, prompts, fps):
    values = [float(video.float().mean()) for video in videos]
    return [float("nan") if hash_of(prompt) % 2 else value for prompt, value in zip(prompts, values)]
"""
WRONG = {
    "--eta": "-1",
    "--clip_range": "many",
    "--kl_strategy": "sometimes",
    "--max_steps": "0",
}


def train(tmp_path, *flags, config="configs/smoke.yaml"):
    command = [python(), "post_train.py", "--config", config, "--output_dir", tmp_path / "run"]
    return subprocess.run(
        [*map(str, command), *flags], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_a_score_that_is_not_a_number_costs_that_reward_only(tmp_path):
    (tmp_path / "mine.py").write_text(MISSING)
    flags = ["--reward_model", f"{tmp_path}/mine.py:brightness", "--valid_video_csv="]
    flags += ["--reward_weights", '{"brightness": 1}']
    flags += ["--max_missing_fraction", "1"]
    ended = train(tmp_path, *flags, "--max_steps", "2")
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    missing = [json.loads(line)["reward/missing"] for line in lines]
    assert len(missing) == 2 and 0 < sum(missing)


def test_all_wrong_settings_are_reported_at_once(tmp_path):
    ended = train(tmp_path, *(word for pair in WRONG.items() for word in pair))
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    for name in WRONG:
        assert name.removeprefix("--") in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists()


DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000


def test_json_that_is_nested_too_deeply_is_refused(tmp_path):
    ended = train(tmp_path, "--reward_weights", DEEP)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "reward_weights" in ended.stderr


SCORER = """
from hyvideo.rewards.rewards import Scorer

class Mine(Scorer):
    dimensions = ("mine",)
    {}

    def score(self, videos, prompts, *, fps):
        return [{{"mine": float(video.float().mean())}} for video in videos]
"""


def test_a_scorer_that_is_wrong_is_one_sentence(tmp_path):
    line = "def check_prompts(self, prompts): raise KeyError('mine.json')"
    (tmp_path / "mine.py").write_text(SCORER.format(line))
    flags = ["--reward_model", f"{tmp_path}/mine.py:Mine", "--reward_weights", '{"mine": 1}']
    ended = train(tmp_path, *flags, "--max_steps", "1")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "mine.json" in ended.stderr.splitlines()[-1], ended.stderr


OBJECTIVE = """
from examples.custom_objective import WeightedRegression

class Mine(WeightedRegression):
    {}
"""


def test_an_objective_that_is_wrong_is_one_sentence(tmp_path):
    line = "def __init__(self, *parts, **options): raise RuntimeError('no file')"
    (tmp_path / "mine.py").write_text(OBJECTIVE.format(line))
    flags = ["--objective", f"{tmp_path}/mine.py:Mine", "--max_steps", "1", "--valid_video_csv="]
    ended = train(tmp_path, *flags, config="configs/miniature_nft.yaml")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "no file" in ended.stderr, ended.stderr


def test_sys_exit_in_an_objective_is_no_success(tmp_path):
    line = "def prepare(self, rollouts): raise SystemExit(0)"
    (tmp_path / "mine.py").write_text(OBJECTIVE.format(line))
    flags = ["--objective", f"{tmp_path}/mine.py:Mine", "--max_steps", "1", "--valid_video_csv="]
    ended = train(tmp_path, *flags, config="configs/miniature_nft.yaml")
    assert ended.returncode == 1 and "mine.py" in ended.stderr, ended.stderr


def test_custom_code_imports_modules_beside_it_and_a_function_may_return_a_tuple(tmp_path):
    (tmp_path / "my_measures.py").write_text("def mean(video): return float(video.float().mean())")
    (tmp_path / "mine.py").write_text(
        "from my_measures import mean\n"
        "def mine(videos, prompts, fps): return tuple(mean(video) for video in videos)\n"
    )
    flags = ["--reward_model", f"{tmp_path}/mine.py:mine", "--reward_weights", '{"mine": 1}']
    ended = train(tmp_path, *flags, "--max_steps", "1", "--valid_video_csv=")
    assert ended.returncode == 0, ended.stderr
