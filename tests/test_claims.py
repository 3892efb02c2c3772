"""Numbers of the studies that other pages repeat are those of the studies' tables."""

import re

import pytest

from tests.test_docs import TEXTS

STUDIES = " ".join(TEXTS[f"docs/{name}.md"] for name in ("study_miniature", "study_recipes", "recipes"))


def plain(text):
    """Return a text on one line, without signs of numbers and percent signs."""
    return re.sub(r"(?<![\d.])[+-](?=\d)", "", re.sub(r"\s+", " ", text)).replace(" %", "")


def passages(page, first, last):
    text = plain(TEXTS[page])
    return text[text.index(first) : text.index(last)]


@pytest.mark.parametrize(
    "page, first, last",
    [
        ("README.md", "## Highlights", "- **On-policy"),
        ("docs/samplers.md", "## Which one", "## How much noise"),
        ("docs/samplers.md", "the equalizer adds", "| velocity KL"),
        ("docs/quickstart.md", "With other seeds", "## Look at"),
    ],
)
def test_a_number_of_a_study_is_in_its_tables(page, first, last):
    found = re.findall(r"\d\.\d{3}(?: \[\d\.\d{3}, \d\.\d{3}\])?", passages(page, first, last))
    ranges = re.findall(r"(\d[\d.]*)(?:–| and )(\d[\d.]*\d)\b", passages(page, first, last))
    studies = plain(STUDIES)
    assert found or ranges
    assert not [number for number in found if number not in studies]
    assert not [pair for pair in ranges if f"{pair[0]} to {pair[1]}" not in studies]


def test_the_seeds_of_the_readme_are_those_of_the_recipes():
    rows = re.findall(
        r"^\| (\d) \| .*?-> ([\d.]+).*?-> ([\d.]+) \|.*?-> ([\d.]+) \|.*?-> ([\d.]+) \|.*?-> (\d+) %",
        TEXTS["README.md"],
        re.M,
    )
    assert [row[0] for row in rows] == ["0", "1", "2"]
    unseen, true = (", ".join(row[column] for row in rows) for column in (3, 4))
    assert f"to {unseen}, " in plain(STUDIES) and f"true reward is {true}, " in plain(STUDIES)
    reward, correct = re.search(
        r"\| 30 \| .*? \| ([\d.]+ to [\d.]+) \| (\d+ to \d+) %", TEXTS["docs/recipes.md"]
    ).groups()
    for column, text in ((1, reward), (5, correct)):
        low, high = map(float, text.split(" to "))
        assert all(low <= round(float(row[column]), 2) <= high for row in rows)
