"""A run that was stopped for reward hacking is not continued, and metrics.jsonl has one line for each
iteration.
"""

import pytest

from hyvideo.records.metrics_file import complete_lines
from hyvideo.settings.sections import RecordSettings
from hyvideo.validation.reward_hacking.rule import MARKER, check_output_dir


def test_a_run_stopped_for_reward_hacking_resumes_only_with_warn(tmp_path):
    settings = RecordSettings(output_dir=str(tmp_path), on_reward_hacking="stop")
    check_output_dir(settings)
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(ValueError, match=MARKER):
        check_output_dir(settings)
    check_output_dir(RecordSettings(output_dir=str(tmp_path), on_reward_hacking="warn"))


@pytest.mark.parametrize("text", ['{"iteration": 1}\n{"itera\n{"iteration": 3}\n', "broken\n{}\n"])
def test_a_broken_line_of_the_metrics_is_named_unless_it_is_the_last(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="line [12] of .*metrics.jsonl"):
        complete_lines(path)
    path.write_text('{"iteration": 1}\n{"itera')
    assert [iteration for iteration, _ in complete_lines(path)] == [1]
