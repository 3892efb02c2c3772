"""A run deletes only what it has written, and a corrupted checkpoint is kept."""

import pytest

from hyvideo.checkpoints import format
from hyvideo.files import run_folder
from hyvideo.files.run_folder import (
    RunRecord,
    claim,
    is_marked,
    remove_after,
)

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
    with pytest.raises(FileExistsError, match="000004"):
        claim(folder, OTHER)


def test_ranks_that_claim_a_folder_at_the_same_time_share_it(tmp_path, monkeypatch):
    folder = tmp_path / "samples" / "000004"
    mark = run_folder.mark

    def mark_slowly(hidden, run):
        mark(hidden, run)
        monkeypatch.setattr(run_folder, "mark", mark)
        claim(folder, run)  # another rank is faster

    monkeypatch.setattr(run_folder, "mark", mark_slowly)
    claim(folder, RUN)
    assert contents(tmp_path) == {"samples/000004/.run": f"{RUN}\n".encode()}


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_is_neither_claimed_nor_written_to(tmp_path, kind):
    path = tmp_path / "samples" / "000004"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
        (path / "000.mp4").write_text("mine")
    elif kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to("nowhere")
    before = contents(tmp_path)
    with pytest.raises(FileExistsError):
        claim(path, RUN)
    assert contents(tmp_path) == before


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
    for name in ("20240101", "000003-good", "000003.corrupted", "7", ".2024.bak"):
        kept.append(tmp_path / "checkpoints" / name)
        kept[-1].mkdir()
        (kept[-1] / "mine").touch()
    before = {path: contents(path) for path in kept}
    remove_after(tmp_path, 2, RUN)
    format.remove_checkpoints_after(tmp_path, 2, RUN)
    assert not any(path.exists() for path in own)
    assert {path: contents(path) for path in kept} == before


def test_a_folder_of_the_run_with_a_users_file_is_kept_under_another_name(tmp_path, capsys):
    claimed(tmp_path / "samples" / "000004", RUN, "scores.json", "notes.txt")
    claimed(tmp_path / "checkpoints" / "000004", RUN, "state.json", "digests.json", "mine.pt")
    remove_after(tmp_path, 2, RUN)
    format.remove_checkpoints_after(tmp_path, 2, RUN)
    assert (tmp_path / "samples" / "000004.kept" / "notes.txt").read_text() == "notes.txt"
    assert (tmp_path / "checkpoints" / "000004.kept" / "mine.pt").exists()
    error = capsys.readouterr().err
    assert "notes.txt" in error and "mine.pt" in error


def test_what_killed_processes_have_left_is_removed(tmp_path):
    for name in (
        "samples/.000004.1a2b.partial/000.mp4",
        "checkpoints/.000004.1a2b.partial/tensors/__0_0.distcp",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / ".run.json.7a.partial").touch()
    remove_after(tmp_path, 2, RUN)
    format.remove_checkpoints_after(tmp_path, 2, RUN)
    assert contents(tmp_path) == {}


def test_a_record_is_read_as_it_was_written(tmp_path):
    assert run_folder.read_record(tmp_path) is None
    run_folder.update_record(tmp_path, has_checkpoint=True)
    assert not list(tmp_path.iterdir())
    record = RunRecord(run=RUN, settings={"eta": 0.1, "prompts_csv": ["a"]}, inputs={"vae": "1"})
    run_folder.write_record(tmp_path, record)
    run_folder.update_record(tmp_path, has_checkpoint=True)
    assert run_folder.read_record(tmp_path) == record.model_copy(update={"has_checkpoint": True})
