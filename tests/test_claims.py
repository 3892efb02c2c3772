"""Numbers of the studies that other pages repeat are those of the studies' tables."""

import re

import pytest
import torch

from tests.test_docs import ROOT, TEXTS

STUDIES = " ".join(
    TEXTS[f"docs/{name}.md"] for name in ("study_miniature", "study_recipes", "recipes")
)


def plain(text):
    """Return a text on one line, without signs of numbers and percent signs."""
    return re.sub(r"(?<![\d.])[+-](?=\d)", "", re.sub(r"\s+", " ", text)).replace(" %", "")


def passages(page, first, last):
    text = plain(TEXTS[page])
    return text[text.index(first) : text.index(last)]


@pytest.mark.parametrize(
    "page, first, last",
    [
        ("README.md", "The default recipe has a price", "- **On-policy"),
        ("docs/samplers.md", "## Which one", "## How much noise"),
        ("docs/algorithms.md", "## Guidance distillation", "one seed)."),
        ("docs/control_runs.md", "## Results", "A second control"),
        ("docs/checks.md", "## 7. Unseen", "## 8."),
        ("docs/few_steps.md", "| [teacher]", "After 80 iterations"),
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


def test_the_ranges_of_the_readme_are_those_of_the_recipes_and_the_study():
    text = TEXTS["README.md"]
    reward, correct = re.search(
        r"\| 30 \| .*? \| ([\d.]+ to [\d.]+) \| (\d+ to \d+) %", TEXTS["docs/recipes.md"]
    ).groups()
    assert f"| after 30 iterations of SAGE-GRPO, seeds 0 to 4 | {reward} | {correct} % |" in text
    study = TEXTS["docs/study_recipes.md"]
    guidance = dict(
        re.findall(
            r"^\| ([\d.]+)(?: \(none\))? \| ([\d.]+) \| [\d.]+ \| \d+ %", study, re.MULTILINE
        )
    )
    assert f"| base model | {float(guidance['1']):.2f} | 34 % |" in text
    assert (
        f"| base model with guidance 3, without training | {float(guidance['3']):.2f} | 92 % |"
        in text
    )
    lost = re.search(
        r"diversity of the videos falls by half, from ([\d.]+) to ([\d.]+\d)", plain(text)
    )
    rows = re.findall(
        r"^\| (base model|SAGE-GRPO, `configs/miniature.yaml`) \|.* ([\d.]+)(?: \[.*?\])? \|$",
        study,
        re.M,
    )
    assert [value for _, value in rows[:2]] == list(lost.groups())


def test_the_python_example_of_the_readme_trains_the_policy(monkeypatch):
    """Two of its videos are sampled; the reward is the miniature's, and every trained weight
    changes.
    """
    (example,) = re.findall(r"```python\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    example = example.replace("* 8", "* 2").replace("(8, *", "(2, *")
    names = {}
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    exec(example.replace("group_size=8", "group_size=2"), names)
    before = names["model"].transformer().state_dict()
    changed = [
        name
        for name, value in names["policy"].state_dict().items()
        if not torch.equal(value, before[name])
    ]
    assert names["x"][-1].shape == (2, *names["LATENTS"]) and len(changed) > len(before) / 2


def test_the_index_links_every_page():
    pages = {name.removeprefix("docs/") for name in TEXTS if name.startswith("docs/")} - {
        "README.md"
    }
    assert not [page for page in pages if f"({page})" not in TEXTS["docs/README.md"]]


COSTS = {
    (gpus, config): row.split(" | ")
    for gpus, config, row in re.findall(
        r"^\| (\d+ [^|]+) \| `([\w/]+)` \| (.*) \|$", TEXTS["docs/cost.md"], re.MULTILINE
    )
}
HOURS, GPU_HOURS, DISK = 3, 4, 6  # columns after the config


@pytest.mark.parametrize(
    "page, passage, run, column",
    [
        (
            "docs/faq.md",
            r"takes ([\d.]+) hours on one RTX 4090",
            "1 RTX 4090 wan21_1gpu_nft",
            HOURS,
        ),
        (
            "docs/faq.md",
            r"takes (\d+) GPU-hours on H100",
            "8 H100 hunyuanvideo15_480p_8gpu",
            GPU_HOURS,
        ),
        (
            "docs/few_steps.md",
            r"([\d.]+) hours on 8 H100",
            "8 H100 hunyuanvideo15_480p_8gpu_student",
            HOURS,
        ),
        (
            "docs/few_steps.md",
            r"([\d.]+) hours on one RTX 4090",
            "1 RTX 4090 wan21_1gpu_student",
            HOURS,
        ),
        ("docs/ratings.md", r"RTX 4090\) \| ([\d.]+)", "1 RTX 4090 wan21_1gpu_dpo", HOURS),
        ("docs/ratings.md", r"H100\) \| ([\d.]+)", "1 H100 hunyuanvideo15_1gpu_dpo", HOURS),
        ("docs/train_wan.md", r"(\d+) GiB of disk\. The", "1 RTX 4090 wan21_1gpu_draft", DISK),
        (
            "docs/reproduce.md",
            r"a run takes (\d+) GPU-hours",
            "64 H100 paper/table2_b_64gpu",
            GPU_HOURS,
        ),
    ],
)
def test_a_page_and_the_table_of_costs_agree(page, passage, run, column):
    gpus, _, config = run.rpartition(" ")
    (number,) = re.findall(passage, re.sub(r"\s+", " ", TEXTS[page]))
    assert number == COSTS[gpus, config][column]
