"""Promise 8: a full disk loses records, not the run; a failed checkpoint leaves the earlier ones
intact and ends with 1.
"""

import pytest

from tests.promises.runs import Run

pytestmark = pytest.mark.system


def test_a_temporarily_full_disk_costs_only_checkpoints_and_records(finished, tmp_path):
    run = Run(tmp_path)
    result = run.start_with(
        "fill_disk", 2, 2, log_video_interval=2, report_to="tensorboard", max_steps=3
    )
    assert result.code == 0, result.output
    for name in ("checkpoint", "metrics.jsonl", "tensorboard"):
        assert f"{name} NOT WRITTEN" in result.output, result.output
    assert "File too large" in result.output
    assert run.names() == ["000001", "000003"]
    assert run.metrics() == finished.metrics() and run.saved(3) == finished.saved(3)


def test_a_run_without_its_last_checkpoint_fails_and_resumes_from_an_earlier_one(
    finished, tmp_path
):
    run = Run(tmp_path)
    result = run.start_with("fill_disk", 2, 3)
    assert result.code == 1 and "checkpoint of iteration 3" in result.output
    assert "the last lines of metrics.jsonl NOT WRITTEN" in result.output
    assert run.names() == ["000001"] and len(run.metrics()) == 1
    assert run.start().code == 0
    assert run.metrics() == finished.metrics() and run.saved(3) == finished.saved(3)
