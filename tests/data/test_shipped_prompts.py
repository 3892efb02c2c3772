"""Tests of the prompts of the full-size configurations: every kind occurs, training and validation
are disjoint.
"""

import csv
from pathlib import Path

import pytest

from hyvideo.models.hunyuan_video15.prompt_encoders import glyph_text

FOLDER = Path(__file__).parents[2] / "assets" / "prompts"


def rows(name: str) -> list[dict[str, str]]:
    with open(FOLDER / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def words(prompt: str) -> set[str]:
    return {word.strip('.,;:!?"').lower() for word in prompt.split()}


@pytest.mark.parametrize("name", ["valid", "train"])
def test_quoted_text_is_found_by_the_glyph_encoder(name):
    for row in rows(name):
        assert bool(glyph_text(row["prompt"])) == (row["kind"] == "text"), row


def test_no_validation_prompt_resembles_a_training_prompt():
    trained = [words(row["prompt"]) for row in rows("train")]
    for row in rows("valid"):
        current = words(row["prompt"])
        assert all(len(current & other) / len(current | other) < 0.5 for other in trained), row[
            "prompt"
        ]
