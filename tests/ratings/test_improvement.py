"""Rounds of improvement: the commands of the steps, and plans that cannot run."""

import pytest

from hyvideo.ratings import improvement
from hyvideo.ratings.improvement import improve, plan_of, require_same_plan, steps_of
from hyvideo.settings.command_line import load_config
from tests.forked import ROOT

CONFIG = ROOT / "configs/miniature_sft.yaml"
PROMPTS = str(ROOT / "assets/miniature/prompts/train.csv")


def plan(num_gpus=1, rounds=2, rate=False, **changes):
    config = load_config(CONFIG, **{"prompts_csv": [PROMPTS]} | changes)
    return plan_of(config, rounds, 4, 3.0, num_gpus=num_gpus, rate=rate)


def value(command, flag):
    words = [str(word) for word in command]
    return words[words.index(flag) + 1]


def test_the_videos_have_the_size_that_is_trained_and_a_further_round_starts_from_the_last(
    tmp_path,
):
    made = plan(validation_height=64, validation_width=64, validation_num_frames=5)
    (_, sample), (score, _), (_, train) = steps_of(made, tmp_path, 1, 1)
    assert [value(sample, flag) for flag in ("--video_length", "--height", "--width")] == [
        "9",
        "32",
        "32",
    ]
    assert score == "score" and value(sample, "--guidance_scale") == "3.0"
    assert value(train, "--max_steps") == "200"
    (_, sample), _, (_, train) = steps_of(made, tmp_path, 2, 1)
    last = str(tmp_path / "round1/run/checkpoints/000200")
    assert value(sample, "--checkpoint_path") == value(train, "--resume_from_checkpoint") == last
    assert value(sample, "--guidance_scale") == "1.0" and value(train, "--max_steps") == "400"
    (tmp_path / "round2/scores").mkdir(parents=True)
    (tmp_path / "round2/scores/videos.csv").write_text("prompt,video\n")
    assert [name for name, _ in steps_of(made, tmp_path, 2, 1)] == ["sample", "train"]


def test_no_two_rounds_sample_with_one_seed(tmp_path):
    made = plan(rounds=3, seed=5)
    seeds = []
    for number in range(1, made.rounds + 1):
        (_, sample), *_ = steps_of(made, tmp_path, number, 1)
        seeds.append(value(sample, "--seed"))
    assert len(set(seeds)) == 3
    (_, other), *_ = steps_of(plan(seed=50), tmp_path, 1, 1)
    assert value(other, "--seed") not in seeds  # the seed of the settings counts


def test_the_settings_are_checked_for_the_processes_that_train():
    plan(num_gpus=2, sp_size=2)
    with pytest.raises(ValueError, match="sp_size"):
        plan(num_gpus=1, sp_size=2)
    with pytest.raises(ValueError, match="objective sft"):
        config = load_config(ROOT / "configs/miniature_nft.yaml")
        plan_of(config, 1, 4, 3.0, num_gpus=1, rate=False)


def test_prompts_that_cannot_be_read_are_named_before_the_first_step(tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("prompt\n")
    for path in (tmp_path / "absent.csv", empty):
        with pytest.raises(ValueError, match=path.name):
            plan(prompts_csv=[str(path)])


def test_a_folder_with_videos_of_another_command_is_refused_but_more_rounds_continue(tmp_path):
    require_same_plan(plan(learning_rate=1e-3), tmp_path / "new")  # failed before its first video
    require_same_plan(plan(), tmp_path / "new")
    (tmp_path / "new/round1/videos").mkdir(parents=True)
    (tmp_path / "new/round1/videos/0000.mp4").write_bytes(b"")
    require_same_plan(plan(rounds=3), tmp_path / "new")
    with pytest.raises(ValueError, match="learning_rate"):
        require_same_plan(plan(learning_rate=1e-3), tmp_path / "new")


def test_videos_without_an_answer_are_counted_and_not_trained_on(tmp_path, monkeypatch):
    table = tmp_path / "round1/rated/videos.csv"
    answers = ["1", "", ""]
    commands = []

    def run(command):
        commands.append(list(map(str, command)))
        if "scripts.rate" in commands[-1]:
            table.parent.mkdir(parents=True, exist_ok=True)
            rows = [f"a red circle,{number}.mp4,{keep}" for number, keep in enumerate(answers)]
            table.write_text("\n".join(["prompt,video,keep", *rows]))
            for number in range(len(answers)):
                (table.parent / f"{number}.mp4").touch()
        return 0

    monkeypatch.setattr(improvement, "run", run)
    with pytest.raises(ValueError, match=r"2 of 3 videos .*the same command"):
        improve(plan(rounds=1, rate=True), tmp_path, 1)
    assert not any("post_train.py" in word for command in commands for word in command)
    answers[1:] = "00"
    assert improve(plan(rounds=1, rate=True), tmp_path, 1) == 0
    assert any("post_train.py" in word for word in commands[-1])
