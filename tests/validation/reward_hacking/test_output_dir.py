"""Checks that a new run does not write into the output_dir of another run."""

import pytest

from hyvideo.config.all_settings import RecordSettings
from hyvideo.validation.reward_hacking.rule import MARKER, check_output_dir


def check(folder, *, resumes, action="stop"):
    resumed = "latest" if resumes else ""
    check_output_dir(
        RecordSettings(
            output_dir=str(folder), resume_from_checkpoint=resumed, on_reward_hacking=action
        )
    )


def test_a_folder_with_another_run_raises_value_error(tmp_path):
    check(tmp_path / "nowhere", resumes=False)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(ValueError, match="already contains a run"):
        check(tmp_path, resumes=False)
    check(tmp_path, resumes=True)


@pytest.mark.parametrize("content", ["", "broken\n{}\n"])
def test_an_empty_metrics_file_is_not_a_run(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    if not content:
        check(tmp_path, resumes=False)
        return
    with pytest.raises(ValueError, match="already contains a run"):
        check(tmp_path, resumes=False)


def test_a_run_with_a_broken_line_is_not_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"itera\n{"iteration": 3}\n')
    with pytest.raises(
        ValueError, match="line 2 of .*metrics.jsonl is not a JSON object with an iteration"
    ):
        check(tmp_path, resumes=True)


def test_a_folder_named_metrics_jsonl_raises_value_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match="metrics.jsonl must be readable"):
        check(tmp_path, resumes=True)


def test_a_run_stopped_for_reward_hacking_resumes_only_with_warn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(ValueError, match="was stopped for reward hacking and would stop again"):
        check(tmp_path, resumes=True)
    check(tmp_path, resumes=True, action="warn")


@pytest.fixture
def start_from(tmp_path):
    """Check the start of a run in ``own`` from checkpoint 2 of another run."""
    other = tmp_path / "other" / "checkpoints" / "000002"
    other.mkdir(parents=True)
    (other / "state.json").write_text('{"iteration": 2}')

    def start(source=other):
        check_output_dir(
            RecordSettings(output_dir=str(tmp_path / "own"), resume_from_checkpoint=str(source))
        )

    return start


def test_a_run_is_not_started_from_another_one_in_a_folder_with_results(tmp_path, start_from):
    own = tmp_path / "own"
    start_from()
    (own / "checkpoints").mkdir(parents=True)
    # it was killed before its first checkpoint
    (own / "metrics.jsonl").write_text('{"iteration": 3}\n')
    start_from()
    (own / "metrics.jsonl").write_text('{"iteration": 2}\n{"iteration": 3}\n')
    with pytest.raises(
        ValueError,
        match="own' contains another run than resume_from_checkpoint '.*other/checkpoints/0",
    ):
        start_from()
    (own / "metrics.jsonl").unlink()
    for name in ("000002", "000005"):
        (own / "checkpoints" / name).mkdir()
        with pytest.raises(ValueError, match="choose a new output_dir, or resume the run in it"):
            start_from()
    (own / "checkpoints" / "000002" / "state.json").write_text('{"iteration": 2}')
    start_from(own / "checkpoints" / "000002")


def test_a_path_that_is_too_long_is_not_a_run():
    check("/".join(["a" * 200] * 25), resumes=False)
