"""Whether a folder holds another run, which nothing may be written into."""

import pytest

from hyvideo.config.sections import RecordSettings
from hyvideo.evaluation.reward_hacking.rule import MARKER, check_output_dir


def check(folder, *, resumes, action="stop"):
    resumed = "latest" if resumes else ""
    check_output_dir(RecordSettings(output_dir=str(folder), resume_from_checkpoint=resumed, on_reward_hacking=action))


def test_a_folder_with_another_run_is_refused(tmp_path):
    check(tmp_path / "nowhere", resumes=False)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(ValueError, match="already contains a run"):
        check(tmp_path, resumes=False)
    check(tmp_path, resumes=True)


@pytest.mark.parametrize("content", ["", "broken\n{}\n"])
def test_only_lines_of_metrics_make_a_run(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    if not content:
        check(tmp_path, resumes=False)
        return
    with pytest.raises(ValueError, match="already contains a run"):
        check(tmp_path, resumes=False)


def test_a_run_with_a_broken_line_is_not_gone_on_with(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"itera\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl is not a JSON object with an iteration"):
        check(tmp_path, resumes=True)


def test_a_folder_in_the_place_of_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match="metrics.jsonl must be readable"):
        check(tmp_path, resumes=True)


def test_a_run_that_ended_for_good_is_gone_on_with_only_where_it_would_not_end_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(ValueError, match="was stopped for reward hacking and would stop again"):
        check(tmp_path, resumes=True)
    check(tmp_path, resumes=True, action="warn")
