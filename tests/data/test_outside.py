"""Tests of atomic file writes, including durability after a power cut."""

import os

import pytest

from hyvideo.data.outside import replacing


def test_a_replacing_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    with replacing(tmp_path / "state.json") as aside:
        aside.write_text("{}")
    assert events == [str(aside), "replace", str(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_an_incomplete_file_replaces_nothing(tmp_path):
    (tmp_path / "state.json").write_text("old")
    with pytest.raises(OSError), replacing(tmp_path / "state.json") as aside:
        aside.write_text("n")
        raise OSError("disk full")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
