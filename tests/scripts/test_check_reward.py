"""Tests of scripts.check_reward."""

import sys
from pathlib import Path

import pytest

from hyvideo.data.videos import write_video
from hyvideo.miniature.reward import MiniatureScorer, miniature_trial
from scripts.check_reward import main

ROOT = Path(__file__).parents[2]
MINIATURE = ["--reward_model", "miniature", "--reward_path", str(ROOT / "assets" / "miniature")]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["check_reward", *map(str, arguments)])
    return main()


def test_a_valid_scorer_exits_with_0_and_a_table(monkeypatch, capsys):
    assert run(monkeypatch, *MINIATURE) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 9 and all(line.startswith("ok ") for line in table)


def test_quick_runs_only_four_checks(monkeypatch, capsys):
    assert run(monkeypatch, *MINIATURE, "--quick") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_broken_scorer_exits_with_1(monkeypatch, capsys):
    monkeypatch.setattr(MiniatureScorer, "score", lambda *_, **__: [])
    assert run(monkeypatch, *MINIATURE) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith(
        "failed answer score: ValueError: score must return a list with one dict per video (1)"
    )


def test_a_missing_dimension_exits_with_1(monkeypatch, capsys):
    assert run(monkeypatch, *MINIATURE, "--dimensions", "VQ", "beauty") == 1
    assert "no finite number for beauty" in capsys.readouterr().out


def test_a_scorer_in_a_custom_file_is_checked(monkeypatch, tmp_path, capsys):
    code = "class Frames:\n    def __init__(self, scale=1.0): self.scale = scale\n"
    code += (
        "    def score(self, v, p, *, fps): return [{'frames': self.scale * len(video)} for video "
        "in v]\n"
    )
    code += "    def check_prompts(self, p): ...\n    def held_out(self, v, p): return {}\n"
    (tmp_path / "custom.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = ["--reward_model", "custom.py:Frames", "--dimensions", "frames", "--quick"]
    for options in (
        '--reward_config={"custom.py:Frames": {"scale": 0.5}}',
        '--options={"scale": 0.5}',
    ):
        assert run(monkeypatch, *words, options) == 0
        assert "frames 24.5" in capsys.readouterr().out


@pytest.mark.system
def test_a_user_video_is_scored(monkeypatch, tmp_path, capsys):
    trial = miniature_trial()
    write_video(tmp_path / "clip.mp4", trial.video, trial.fps)
    golden = ROOT / "tests" / "golden" / "videoalign"
    scorer = [
        "--reward_model",
        "videoalign",
        "--model_path",
        golden / "VideoReward",
        "--device",
        "cpu",
    ]
    options = ["--options", f'{{"base": "{golden / "base"}"}}', "--quick"]
    assert (
        run(
            monkeypatch,
            *scorer,
            *options,
            "--video",
            tmp_path / "clip.mp4",
            "--prompt",
            trial.prompt,
        )
        == 0
    )
    assert "Overall" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--reward_model", "taste"], "reward_model must be one of"),
        (
            ["--reward_model", "videoalign", "--model_path", "nowhere"],
            "model_config.json does not exist",
        ),
        (
            ["--reward_model", "clip", "--model_path", "./nowhere"],
            "no CLIP model could be read from ./nowhere",
        ),
        (["--reward_model", "nowhere.py:Own"], "No such file"),
        ([*MINIATURE, "--options", '{"depth": 3}'], "has no option depth"),
        (
            [*MINIATURE, "--options", '{"device": "cpu", "root": "."}'],
            "must not set device, root of miniature",
        ),
        ([*MINIATURE, "--options", "{"], "reward_config"),
        ([*MINIATURE, "--reward_config", '{"clip": {}}'], "has no option clip"),
        (
            [*MINIATURE, "--reward_config", '{"miniature": 1}'],
            "must map miniature to a mapping of options",
        ),
        ([*MINIATURE, "--video", "a.mp4"], "--video needs --prompt"),
        ([*MINIATURE, "--video", "a.mp4", "--prompt", "a"], "no video file a.mp4"),
    ],
)
def test_invalid_arguments_exit_with_2_and_a_message(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
