"""Whether a folder holds another run, which nothing may be written into."""

import pytest

from hyvideo.records.run_folder import check_run_folder


def test_a_folder_with_another_run_is_refused(tmp_path):
    check_run_folder(tmp_path / "nowhere", resumes=False, end_marker=None)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(ValueError, match="already holds a run"):
        check_run_folder(tmp_path, resumes=False, end_marker=None)
    check_run_folder(tmp_path, resumes=True, end_marker="hacked.json")


@pytest.mark.parametrize("content", ["", "broken\n{}\n"])
def test_only_lines_of_metrics_make_a_run(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    if not content:
        check_run_folder(tmp_path, resumes=False, end_marker=None)
        return
    with pytest.raises(ValueError, match="already holds a run"):
        check_run_folder(tmp_path, resumes=False, end_marker=None)


def test_a_run_with_a_broken_line_is_not_gone_on_with(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"itera\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl is not a JSON object with an iteration"):
        check_run_folder(tmp_path, resumes=True, end_marker=None)


def test_a_folder_in_the_place_of_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match="metrics.jsonl must be a readable file"):
        check_run_folder(tmp_path, resumes=True, end_marker=None)


def test_a_run_that_ended_for_good_is_gone_on_with_only_where_it_would_not_end_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    (tmp_path / "hacked.json").write_text("{}")
    with pytest.raises(ValueError, match="ended for reward hacking and would do so again"):
        check_run_folder(tmp_path, resumes=True, end_marker="hacked.json")
    check_run_folder(tmp_path, resumes=True, end_marker=None)
