"""Promise 1: after a kill, the same command resumes from the newest complete checkpoint, or starts
over where none was written. A finished run that is started again says so.
"""

import json
import shutil
import signal

import pytest

from hyvideo.files.run_folder import read_record
from tests.promises.runs import Run

KILLED = -signal.SIGKILL


def iterations(run):
    return [line["iteration"] for line in run.metrics()]


def test_a_run_that_is_killed_before_its_first_checkpoint_starts_over(tmp_path):
    run = Run(tmp_path, save_interval=9, max_steps=2, log_video_interval=1)
    assert run.start("rollout", 2).code == KILLED
    assert iterations(run) == [1] and not (run.out / "checkpoints").exists()
    # the recorded iteration would be lost
    refused = run.start(eta=0.1)
    assert refused.code == 2 and "--allow_changed_settings eta" in refused.output
    assert iterations(run) == [1]
    first = read_record(run.out).run
    result = run.start()
    assert result.code == 0, result.output
    assert iterations(run) == [1, 2] and run.names() == ["000002"]
    assert run.names("rollouts") == ["000001", "000002"] and read_record(run.out).run == first


@pytest.mark.system
def test_a_run_that_is_killed_while_it_writes_its_first_checkpoint_starts_over(tmp_path):
    run = Run(tmp_path, max_steps=1)
    assert run.start("save", 1).code == KILLED
    assert run.start().code == 0
    assert iterations(run) == [1] and run.names() == ["000001"]


def test_a_run_that_is_killed_between_a_checkpoint_and_its_record_resumes(copy):
    record = json.loads((copy.out / "run.json").read_text())
    (copy.out / "run.json").write_text(json.dumps(record | {"has_checkpoint": False}))
    result = copy.start()
    assert result.code == 0 and "resuming from iteration 3" in result.output
    assert read_record(copy.out).has_checkpoint and iterations(copy) == [1, 2, 3, 4]


def test_a_finished_run_prints_its_summary_and_changes_nothing(copy):
    before = copy.files()
    result = copy.start(max_steps=3)
    assert result.code == 0 and "is finished" in result.output and "Traceback" not in result.output
    refused = copy.start(max_steps=3, eta=0.1)
    assert refused.code == 2 and "--allow_changed_settings eta" in refused.output
    assert copy.files() == before


def test_checkpoints_that_are_missing_are_not_trained_again(copy):
    shutil.rmtree(copy.out / "checkpoints")
    before = copy.files()
    result = copy.start()
    assert result.code == 2 and "output_dir" in result.output
    assert copy.files() == before


def test_a_new_run_is_refused_only_where_results_are(finished, tmp_path):
    run = Run(tmp_path, max_steps=1)
    mine = run.out / "samples" / "000001" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    refused = run.start()
    assert refused.code == 2 and "output_dir" in refused.output and "samples" in refused.output
    mine.unlink()
    mine.parent.rmdir()
    (run.out / "train.log").write_text("a log")
    (run.out / "notes.txt").write_text("mine")
    assert run.start().code == 0
    assert (run.out / "notes.txt").read_text() == "mine"
    before = run.files()
    refused = run.start(resume_from_checkpoint="")  # such as that of an unset variable
    assert refused.code == 2 and "resume_from_checkpoint" in refused.output
    other = str(finished.checkpoint(2))
    refused = run.start(resume_from_checkpoint=other, max_steps=3)
    assert refused.code == 2 and "resume_from_checkpoint" in refused.output
    assert run.files() == before


@pytest.mark.system
def test_a_run_from_the_checkpoint_of_another_run_resumes_itself(finished, tmp_path):
    run = Run(tmp_path, resume_from_checkpoint=str(finished.checkpoint(1)), save_interval=9)
    for _ in range(2):  # before its first checkpoint, it begins with that of the other run
        result = run.start("rollout", 3)
        assert result.code == KILLED and "from iteration 1" in result.output
        assert iterations(run) == [2]
    assert run.start().code == 0
    assert iterations(run) == [2, 3] and run.names() == ["000003"]
    assert run.saved(3) == finished.saved(3)
    result = run.start(max_steps=4)
    assert result.code == 0 and "from iteration 3" in result.output
