"""configs/wan21_4gpu_hpsv3.yaml, the settings of a public run, on the miniature of Wan: the share of
one of its four GPUs in a third of an iteration, four sampling steps instead of 20, and the true
reward instead of HPSv3.
"""

import csv
import json

import pytest

import post_train
from hyvideo.records.metrics_file import read_metrics
from hyvideo.validation.paired import paired_gains
from scripts import compare_policies

CONFIG = "configs/wan21_4gpu_hpsv3.yaml"
MINIATURE = [
    "--pretrained_model_root", "assets/miniature_wan", "--transformer_version", "miniature_wan",
    "--device", "cpu", "--dtype", "fp32", "--vae_dtype", "fp32", "--num_threads", 1,
    "--height", 32, "--width", 32, "--sample_n_frames", 9, "--fps", 8,
    "--prompts_csv", "assets/miniature/prompts/train.csv",
    "--reward_model", "miniature", "--reward_weights", '{"VQ": 0.5, "MQ": 0.5, "TA": 1}',
    "--reward_config", "{}", "--grpo_sampling_steps", 4, "--validation_steps", 4,
    "--validation_batch_size", 48, "--gradient_accumulation_steps", 2, "--max_steps", 2,
    "--validation_interval", 2, "--log_num_videos", 0, "--report", "false",
]  # fmt: skip


@pytest.fixture
def prompts(tmp_path):
    """24 prompts for the validation, as many as in the config."""
    with open("assets/miniature/prompts/valid.csv", newline="") as file:
        rows = list(csv.DictReader(file))[::2]
    path = tmp_path / "valid.csv"
    path.write_text("prompt\n" + "".join(f"{row['prompt']}\n" for row in rows))
    return path


@pytest.mark.slow
def test_the_recipe_trains_and_its_gains_are_paired(prompts, tmp_path, exit_code, capsys):
    words = ["--config", CONFIG, *MINIATURE, "--valid_video_csv", prompts]
    # two updates with the learning rate of the config hardly change a video
    words += ["--output_dir", tmp_path / "run", "--learning_rate", 3e-3]
    assert exit_code(post_train.main, *words) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["grad/norm"] > 0 for line in lines)

    folders = [tmp_path / "run" / "samples" / number for number in ("000000", "000002")]
    base, trained = (json.loads((folder / "scores.json").read_text()) for folder in folders)
    assert len(base) == 48 and len({row["prompt"] for row in base}) == 24
    gain = paired_gains(base, trained)["reward"]
    assert gain.num_pairs == 48 and gain.over_pairs.mean != 0
    assert gain.below[1] + gain.above[1] == 48 and min(gain.below[1], gain.above[1]) > 0

    capsys.readouterr()
    scores = [f"base={folders[0]}", f"trained={folders[1]}"]
    assert exit_code(compare_policies.main, "--scores", *scores) == 0
    assert f"{gain.over_pairs.mean:+.3f}" in capsys.readouterr().out
