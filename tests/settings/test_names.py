"""The flat names of the settings, and the files that are shipped with them."""

import json

import pytest

from hyvideo.settings.command_line import load_config, read_settings
from hyvideo.settings.config import LEAVES
from tests.forked import ROOT

SHIPPED = [
    *sorted(
        path
        for path in (ROOT / "configs").rglob("*.yaml")
        if path.parent.name not in ("recipes", "cloud")
    ),
    ROOT / "examples/mochi/mochi_8gpu.yaml",
]


def test_every_name_keeps_its_default_and_its_traits():
    """A changed line of names.json changes the files of people, or which runs count as the same
    experiment.
    """
    now = {
        name: [leaf.default, leaf.decides, *(["measured"] if leaf.measured else [])]
        for name, leaf in LEAVES.items()
    }
    assert now == json.loads((ROOT / "tests/settings/names.json").read_text())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_loads_with_the_values_that_it_gives(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    values = load_config(path).flat()
    given = read_settings(path)
    assert given
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(values[name], str):
            value = json.dumps(value)
        if isinstance(values[name], list) and isinstance(value, str):
            value = [value] if value else []
        if isinstance(value, bool) and isinstance(values[name], str):
            value = str(value).lower()
        assert values[name] == value, name
