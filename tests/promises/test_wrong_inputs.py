"""Promises 6, 9 and 11: damaged weights and wrong settings end a run before anything is sampled, and
a score that is missing costs that reward only.
"""

import json
import shutil
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


@pytest.mark.parametrize("value", [b"\0", b"\xff"], ids=["zeros", "not finite"])
def test_weights_whose_second_half_is_damaged_are_refused(tmp_path, value):
    root = tmp_path / "weights"
    shutil.copytree(ROOT / "assets" / "miniature", root)
    file = next((root / "transformer").rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    half = len(content) // 2
    content[half:] = value * (len(content) - half)
    file.write_bytes(content)
    flags = ["--pretrained_model_root", str(root), "--max_steps", "1"]
    ended = train(tmp_path, *flags, config="configs/miniature.yaml")
    assert ended.returncode == 2 and file.name in ended.stderr, ended.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


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
