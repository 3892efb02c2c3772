"""Tests of atomic file writes, including durability after a power cut, and of the parser of command
lines.
"""

import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hyvideo.data.cli import Parser, exit_on_error
from hyvideo.data.files import publish


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


def test_a_file_of_tensors_on_a_full_disk_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(OSError, match="latents"), publish(tmp_path / "latents") as aside:
        raise SafetensorError(f"Error while serializing: I/O error: File too large: {aside}")
    assert not [*tmp_path.iterdir()]


def test_a_write_to_a_full_disk_names_the_file(tmp_path, limited_file_size):
    with pytest.raises(OSError) as raised, limited_file_size(10):
        with publish(tmp_path / "scores.json") as aside:
            aside.write_text("x" * 100)
    assert raised.value.filename == str(tmp_path / "scores.json")


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


def test_old_names_of_flags_are_accepted_in_groups_too():
    options = make_parser().parse_args(["--out", "x", "--model_path=ckpts"])
    assert (options.output_dir, options.pretrained_model_root) == (Path("x"), "ckpts")


def test_an_unknown_flag_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--output_path", "x"])
    assert "--output_dir" in capsys.readouterr().err


def test_exit_on_error_reports_a_path_that_cannot_be_written(capsys):
    with pytest.raises(SystemExit) as ended, exit_on_error("program.py"):
        os.mkdir("/proc/nothing")
    assert ended.value.code == 2
    assert "/proc/nothing" in capsys.readouterr().err
