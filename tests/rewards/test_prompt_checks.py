"""Checks of prompts: lists of different questions in a prompts CSV."""

import pytest

from hyvideo.rewards.prompt_checks import read_checks


def test_checks_are_read_from_a_column_of_a_prompts_csv(tmp_path):
    path = tmp_path / "checks.csv"
    path.write_text('prompt,checks\na cat,"[""Is it a cat?"", ""Does it jump?""]"\n')
    assert read_checks([path]) == {"a cat": ["Is it a cat?", "Does it jump?"]}
    path.write_text("prompt,checks\nother,\n")
    with pytest.raises(ValueError, match="other"):
        read_checks([path])
    path.write_text('prompt,checks,seed\na,"[""Is it red?""]",1\na,"[""Is it red?""]",2\n')
    assert read_checks([path]) == {"a": ["Is it red?"]}


def test_rows_of_one_prompt_with_other_questions_are_named(tmp_path):
    """The judge asked only those of the last row."""
    path = tmp_path / "checks.csv"
    path.write_text('prompt,checks\na,"[""Is it red?""]"\na,"[""Is it blue?""]"\n')
    with pytest.raises(ValueError, match="row 1 of .* and row 2 of "):
        read_checks([path])
