"""Tests of atomic file writes, including durability after a power cut, and of the parser of command
lines.
"""

import argparse
import os
from pathlib import Path

import pytest

from hyvideo.files.cli import Parser, exit_on_error
from hyvideo.files.files import publish
from hyvideo.files.text import nearest


def test_a_replacing_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    with publish(tmp_path / "state.json") as aside:
        aside.write_text("{}")
    assert events == [str(aside), "replace", str(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def make_parser():
    parser = Parser("Draw.")
    group = parser.add_argument_group("files")
    group.add_argument("--output_dir", type=Path, default=Path("outputs/a"), help="folder")
    group.add_argument("--pretrained_model_root", help="checkpoints; default: the run's")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1], help="seeds, 100 %% of them"
    )
    parser.add_argument("--jobs", type=int, default=0, help="jobs")
    parser.add_argument("--quick", action="store_true", help="fewer")
    return parser


def test_an_empty_path_is_an_error_and_not_the_current_folder(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--output_dir", ""])
    assert "--output_dir" in capsys.readouterr().err
    assert make_parser().parse_args(["--output_dir", "."]).output_dir == Path()


def test_an_unknown_flag_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--output_path", "x"])
    assert "--output_dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word, names, meant",
    [
        ("--lr", ["--lora_r", "--learning_rate"], "--learning_rate"),
        ("--steps", ["--total_steps", "--num_inference_steps"], "--num_inference_steps"),
        ("--num-frames=9", ["--num_threads", "--video_length"], "--video_length"),
        ("--checkpoint", ["--reward_checkpoint_mode", "--checkpoint_path"], "--checkpoint_path"),
        ("--epochs", ["--eps", "--max_steps"], "--max_steps"),
        ("--model", ["--mode", "--pretrained_model_root"], "--pretrained_model_root"),
        ("--batch", ["--patch", "--batch_size"], "--batch_size"),
        ("clipscore", ["pickscore", "clip"], "clip"),
        ("lernign_rate", ["learning_rate"], "learning_rate"),
    ],
)
def test_a_word_of_other_programs_is_answered_with_our_name(word, names, meant):
    """Flags of diffusers' and TRL's scripts, as people type them."""
    assert nearest(word, names) == f"did you mean {meant}?"


def test_no_name_is_suggested_for_a_word_that_is_far_from_all():
    assert nearest("--zzz", ["--learning_rate"]) == ""


def test_a_hidden_flag_is_never_suggested(capsys):
    parser = make_parser()
    parser.add_argument("--job_type", help=argparse.SUPPRESS)
    with pytest.raises(SystemExit):
        parser.parse_args(["--job_typ", "x"])
    assert "job_type" not in capsys.readouterr().err.partition("unrecognized")[2]


def test_the_flag_of_the_old_launcher_names_the_new_one(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--local-rank=1"])
    assert "torchrun" in capsys.readouterr().err


def test_exit_on_error_reports_a_path_that_cannot_be_written(capsys):
    with pytest.raises(SystemExit) as ended, exit_on_error("program.py"):
        os.mkdir("/proc/nothing")
    assert ended.value.code == 2
    assert "/proc/nothing" in capsys.readouterr().err
