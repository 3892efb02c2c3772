"""A run removes and replaces only files that it can prove to be its own."""

import json
import os

import pytest

from hyvideo.data import run_folder
from hyvideo.data.run_folder import RunRecord, claim, is_marked, remove_after, set_aside

RUN, OTHER = "0f0f0f0f", "1e1e1e1e"


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def claimed(folder, run, *names):
    claim(folder, run)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_claimed_folder_has_the_mark_of_its_run_and_is_claimed_again_only_by_it(tmp_path):
    folder = tmp_path / "samples" / "000004"
    claim(folder, RUN)
    claim(folder, RUN)
    assert is_marked(folder, RUN) and not is_marked(folder, OTHER)
    assert [path.name for path in tmp_path.rglob("*")] == ["samples", "000004", ".run"]
    with pytest.raises(FileExistsError, match="this run has not made this folder"):
        claim(folder, OTHER)


def test_a_folder_of_another_is_neither_claimed_nor_written_to(tmp_path):
    for name in ("folder", "file", "link"):
        path = tmp_path / "samples" / name
        path.parent.mkdir(exist_ok=True)
        if name == "folder":
            path.mkdir()
            (path / "000.mp4").write_text("mine")
        elif name == "file":
            path.write_text("mine")
        else:
            path.symlink_to("nowhere")
        before = contents(tmp_path)
        with pytest.raises(FileExistsError):
            claim(path, RUN)
        assert contents(tmp_path) == before


def test_a_copy_under_another_number_is_not_marked(tmp_path):
    folder = claimed(tmp_path / "samples" / "000004", RUN, "scores.json")
    copy = tmp_path / "samples" / "000006"
    copy.mkdir()
    (copy / ".run").write_bytes((folder / ".run").read_bytes())
    assert not is_marked(copy, RUN)


@pytest.mark.parametrize("mark", ["", "{", "[1]", '{"run": 1}', '{"folder": "samples/000004"}'])
def test_an_invalid_mark_is_no_mark(tmp_path, mark):
    folder = tmp_path / "samples" / "000004"
    folder.mkdir(parents=True)
    (folder / ".run").write_text(mark)
    assert run_folder.mark_of(folder) is None


def test_a_pipe_is_no_mark(tmp_path):
    folder = tmp_path / "samples" / "000004"
    folder.mkdir(parents=True)
    os.mkfifo(folder / ".run")
    assert run_folder.mark_of(folder) is None


def test_only_later_results_of_the_run_are_removed(tmp_path):
    own = [
        claimed(tmp_path / parent / "000004", RUN, "scores.json", "000.mp4")
        for parent in ("samples", "rollouts")
    ]
    kept = [
        claimed(tmp_path / "samples" / "000002", RUN, "scores.json"),
        claimed(tmp_path / "rollouts" / "000005", OTHER, "scores.json"),
        claimed(tmp_path / "checkpoints" / "000005", OTHER, "state.json"),
    ]
    for parent in ("samples", "checkpoints", "rollouts"):
        kept.append(tmp_path / parent / "20240101")
        kept[-1].mkdir()
        (kept[-1] / "mine").touch()
    for name in (".2024.bak", ".000003.partial", "000003-good", "7"):
        kept.append(tmp_path / "checkpoints" / name)
        kept[-1].mkdir()
        (kept[-1] / "mine").touch()
    (tmp_path / ".mine.partial").touch()
    (tmp_path / ".notes.txt.12.partial").touch()
    before = {path: contents(path) for path in kept}
    remove_after(tmp_path, 2, RUN)
    assert not any(path.exists() for path in own)
    assert {path: contents(path) for path in kept} == before
    assert (tmp_path / ".mine.partial").exists() and (tmp_path / ".notes.txt.12.partial").exists()


def test_a_folder_of_the_run_with_a_users_file_is_set_aside(tmp_path, capsys):
    claimed(tmp_path / "samples" / "000004", RUN, "scores.json", "notes.txt")
    claimed(tmp_path / "checkpoints" / "000004", RUN, "state.json", "tensors/mine.pt")
    remove_after(tmp_path, 2, RUN)
    assert (tmp_path / "samples" / "000004-kept" / "notes.txt").read_text() == "notes.txt"
    assert (tmp_path / "checkpoints" / "000004-kept" / "tensors" / "mine.pt").exists()
    error = capsys.readouterr().err
    assert (
        "it has files that no run writes, notes.txt; kept as 000004-kept" in error
        and "tensors/mine.pt" in error
    )
    assert not list(tmp_path.glob("*/.[0-9]*"))


def test_partial_files_of_the_run_are_removed(tmp_path):
    for name in (
        "samples/.000004.1a2b.partial/000.mp4",
        "checkpoints/.000004.1a2b.removed/tensors/__0_0.distcp",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    for name in (
        ".config.yaml.12.partial",
        ".metrics.jsonl.7.partial",
        "checkpoints/.latest.9.partial",
    ):
        (tmp_path / name).touch()
    remove_after(tmp_path, 2, RUN)
    assert contents(tmp_path) == {}


def test_a_folder_is_set_aside_under_a_free_name(tmp_path):
    (tmp_path / "000004-damaged").mkdir()
    (tmp_path / "000004").mkdir()
    assert set_aside(tmp_path / "000004", "-damaged").name == "000004-damaged-2"


def test_the_record_remembers_the_first_checkpoint(tmp_path):
    assert run_folder.read_record(tmp_path) is None
    run_folder.record_saved(tmp_path)
    assert not os.listdir(tmp_path)
    run_folder.write_record(tmp_path, RunRecord(RUN))
    assert run_folder.read_record(tmp_path) == RunRecord(RUN, has_saved=False)
    run_folder.record_saved(tmp_path)
    assert run_folder.read_record(tmp_path) == RunRecord(RUN, has_saved=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": "a", "more": 1}'])
def test_an_invalid_record_raises_value_error(tmp_path, text):
    (tmp_path / ".run").write_text(text)
    with pytest.raises(ValueError, match="must be the record of the run"):
        run_folder.read_record(tmp_path)


def test_files_that_a_checkpoint_has_are_known(tmp_path):
    folder = claimed(
        tmp_path / "checkpoints" / "000004",
        RUN,
        "tensors/__0_0.distcp",
        "tensors/__31_2.distcp",
        "tensors/.metadata",
        "lora/pytorch_lora_weights.safetensors",
        "model.json",
        "state.json",
        "manifest.json",
    )
    assert run_folder.other_contents(folder) == []
    (folder / "tensors" / "link.distcp").symlink_to("__0_0.distcp")
    (folder / "state.json.bak").touch()
    assert run_folder.other_contents(folder) == ["state.json.bak", "tensors/link.distcp"]
    assert json.loads((folder / ".run").read_text())["folder"] == "checkpoints/000004"
