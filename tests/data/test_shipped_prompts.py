"""Tests of the prompts of the full-size configurations: every kind occurs, training and validation
are disjoint.
"""

import csv
from collections import Counter
from pathlib import Path

import pytest

from hyvideo.data.prompts import read_requests
from hyvideo.models.hunyuan_video15.prompt_encoders import glyph_text

FOLDER = Path(__file__).parents[2] / "assets" / "prompts"
KINDS = ("people", "animals", "objects", "camera", "motion", "style", "text")


def rows(name: str) -> list[dict[str, str]]:
    with open(FOLDER / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def words(prompt: str) -> set[str]:
    return {word.strip('.,;:!?"').lower() for word in prompt.split()}


@pytest.mark.parametrize("name, number", [("valid", 64), ("train", 256)])
def test_each_file_has_enough_prompts_of_every_kind(name, number):
    prompts = [request.prompt for request in read_requests(FOLDER / f"{name}.csv")]
    assert prompts == [row["prompt"] for row in rows(name)]
    assert len(set(prompts)) == len(prompts) == number
    counts = Counter(row["kind"] for row in rows(name))
    assert set(counts) == set(KINDS) and min(counts.values()) >= number // 8


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
