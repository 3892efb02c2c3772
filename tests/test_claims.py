"""The Python example of the tutorial works, and the index links every page."""

import re

import torch

from tests.test_docs import ROOT, TEXTS


def test_the_python_example_of_the_tutorial_trains_the_policy(monkeypatch):
    """Two of its videos are sampled; the reward is the miniature's, and every trained weight
    changes.
    """
    (example,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/tutorial.md"], re.DOTALL)
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
