"""Promise 7: two programs never write one folder, and one that has lost its lease publishes nothing
more. Nothing is deleted that the run has not written.
"""

import shutil
import subprocess
import time

import pytest

from tests.forked import ROOT
from tests.promises.runs import Run


@pytest.mark.system
def test_a_second_run_in_the_folder_is_refused_and_does_not_disturb_the_first(finished, tmp_path):
    run = Run(tmp_path)
    command = run.command("wait_in_iteration", 2, str(tmp_path / "waits"), str(tmp_path / "go"))
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as first:
        while not (tmp_path / "waits").exists():
            assert first.poll() is None, "the run ended early"
            time.sleep(0.05)
        before = run.files()
        refused = run.start()
        assert refused.code == 2 and "is in use by process" in refused.output
        after = run.files()
        assert after == before
        (tmp_path / "go").touch()
        assert first.wait() == 0
    assert run.saved(3) == finished.saved(3)


@pytest.mark.system
def test_a_run_that_has_lost_the_folder_publishes_nothing_more(tmp_path):
    run = Run(tmp_path)
    result = run.start_with("delete_lease", str(run.out), 2)
    assert result.code == 2 and ".lease" in result.output and "Traceback" not in result.output
    assert run.names() == ["000001"] and [line["iteration"] for line in run.metrics()] == [1]
    assert run.start(max_steps=2).code == 0
    assert run.names() == ["000001", "000002"]


def test_only_checkpoints_of_the_run_are_deleted_and_files_of_others_are_kept(copy):
    """A user has added a checkpoint of another run, a copy of one, and a note."""
    added = copy.checkpoint(1)
    (added / ".run").write_text("of another run\n")
    shutil.copytree(copy.checkpoint(2), copy.out / "checkpoints" / "best")
    (copy.checkpoint(2) / "note.txt").write_text("mine")
    result = copy.start(save_total_limit=1)
    assert result.code == 0, result.output
    assert copy.names() == ["000001", "000002.kept", "000004", "best"]
    assert (copy.out / "checkpoints" / "000002.kept" / "note.txt").read_text() == "mine"


@pytest.mark.system
def test_files_that_appear_during_the_run_are_not_replaced(tmp_path):
    run = Run(tmp_path, max_steps=1, log_video_interval=1)
    result = run.start_with("add_videos", str(run.out))
    assert result.code == 0 and "rollouts/000001" in result.output, result.output
    assert run.names("rollouts/000001") == ["mine"]
