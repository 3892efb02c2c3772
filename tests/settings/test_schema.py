"""The JSON schema that editors check YAML files of settings with."""

import os
import re

import pytest
import yaml

from hyvideo.settings.command_line import read_settings
from scripts.settings_schema import PATH, schema, text
from tests.settings.test_names import SHIPPED

LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "enum": lambda value, choices: value in choices,
    "const": lambda value, choice: value == choice,
    "pattern": lambda value, pattern: re.search(pattern, value),
    "items": lambda value, item: all(fits(each, item) for each in value),
}
TYPES = {"boolean": bool, "string": str, "array": list, "object": dict}


def fits(value, allowed):
    """Return whether a value fits the part of JSON Schema that the file uses."""
    if "anyOf" in allowed:
        return any(fits(value, each) for each in allowed["anyOf"])
    kind = allowed.get("type")
    if kind in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if kind == "integer" and value != int(value):
            return False
    elif kind is not None and not isinstance(value, TYPES[kind]):
        return False
    return all(check(value, allowed[name]) for name, check in LIMITS.items() if name in allowed)


class Loader(yaml.SafeLoader):
    """YAML with numbers such as 1e-5, as of editors."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def problems(content, whole):
    """Return the names of a file that do not fit the schema."""
    allowed = whole["properties"]
    return [
        name
        for name, value in content.items()
        if name not in allowed or not fits(value, allowed[name])
    ]


def test_the_schema_is_up_to_date(check_generated):
    check_generated(PATH, text())


def test_shipped_files_name_the_schema_and_fit_it():
    whole = schema()
    for path in SHIPPED:
        first = path.read_text().splitlines()[0]
        relative = os.path.relpath(PATH, path.parent)
        assert first == f"# yaml-language-server: $schema={relative}"
        assert problems(yaml.load(path.read_text(), Loader), whole) == [], path


@pytest.mark.parametrize(
    "line, is_legal",
    [
        ("eta: 0.5", True),
        ("eta: -1", False),
        ("etta: 0.5", False),
        ("batch_size: 2.5", False),
        ("use_muon: perhaps", False),
        ("prompts_csv: a.csv", True),
        ("prompts_csv: [1]", False),
        ("objective: nft", True),
        ("objective: own.py:Own", True),
        ("objective: nfd", False),
        ("reward_weights: {VQ: 1}", True),
        ("fps: 24", True),
        ("environment: {revision: a}", True),
    ],
)
def test_the_schema_accepts_what_the_program_accepts(tmp_path, line, is_legal):
    (tmp_path / "run.yaml").write_text(line)
    assert (problems(yaml.load(line, Loader), schema()) == []) == is_legal
    if is_legal:
        read_settings(tmp_path / "run.yaml")
