"""A run that was stopped for reward hacking is not continued."""

import pytest

from hyvideo.settings.sections import RecordSettings
from hyvideo.validation.reward_hacking.rule import MARKER, check_output_dir


def test_a_run_stopped_for_reward_hacking_resumes_only_with_warn(tmp_path):
    settings = RecordSettings(output_dir=str(tmp_path), on_reward_hacking="stop")
    check_output_dir(settings)
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(ValueError, match=MARKER):
        check_output_dir(settings)
    check_output_dir(RecordSettings(output_dir=str(tmp_path), on_reward_hacking="warn"))
