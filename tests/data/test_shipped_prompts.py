"""The prompts that ship with the full-size configurations: of every kind, and none both to train and to validate on."""

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
def test_a_file_has_its_number_of_prompts_of_every_kind_and_the_kinds_are_not_read(name, number):
    prompts = [request.prompt for request in read_requests(FOLDER / f"{name}.csv")]
    assert prompts == [row["prompt"] for row in rows(name)]
    assert len(set(prompts)) == len(prompts) == number
    counts = Counter(row["kind"] for row in rows(name))
    assert set(counts) == set(KINDS) and min(counts.values()) >= number // 8


@pytest.mark.parametrize("name", ["valid", "train"])
def test_quoted_text_is_what_the_glyph_encoder_reads(name):
    for row in rows(name):
        assert bool(glyph_text(row["prompt"])) == (row["kind"] == "text"), row


def test_lengths_go_from_a_phrase_to_three_sentences():
    for name in ("valid", "train"):
        lengths = sorted(len(row["prompt"].split()) for row in rows(name))
        assert lengths[0] <= 8 and lengths[-1] >= 30 and lengths[-1] <= 60


def test_no_prompt_to_validate_on_is_one_to_train_on_or_nearly_one():
    trained = [words(row["prompt"]) for row in rows("train")]
    for row in rows("valid"):
        own = words(row["prompt"])
        assert all(len(own & other) / len(own | other) < 0.5 for other in trained), row["prompt"]
