"""Checks of prompts: lists of different questions in a prompts CSV."""

import json

import pytest

from hyvideo.rewards.prompt_checks import parse_checks, read_checks

CHECKS = [f"Is there a {word}?" for word in ("cat", "dog", "hat", "sun", "pan")]


def test_checks_are_read_from_a_column_of_a_prompts_csv(tmp_path):
    path = tmp_path / "checks.csv"
    path.write_text('prompt,checks\na cat,"[""Is it a cat?"", ""Does it jump?""]"\n')
    assert read_checks(path) == {"a cat": ["Is it a cat?", "Does it jump?"]}
    path.write_text("prompt,checks\nother,\n")
    with pytest.raises(ValueError, match="other"):
        read_checks(path)


BAD = [
    "five questions",
    "[]",
    json.dumps([*CHECKS[:4], CHECKS[0]]),
    json.dumps([*CHECKS[:4], 5]),
    "[" * 9999,
]


@pytest.mark.parametrize("text", BAD)
def test_anything_but_different_questions_is_rejected(text):
    with pytest.raises(ValueError, match="checks"):
        parse_checks(text, "")
