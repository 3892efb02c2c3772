"""The JSON schema that editors check YAML files of settings with."""

import os
import re

import jsonschema
import pytest
import yaml

from hyvideo.settings.command_line import read_settings
from scripts.pages.__main__ import SCHEMA
from scripts.pages.settings_schema import schema
from tests.settings.test_names import SHIPPED


class Loader(yaml.SafeLoader):
    """YAML with numbers such as 1e-5, as of editors."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def problems(content, whole):
    """Return what does not fit the schema."""
    return list(jsonschema.Draft7Validator(whole).iter_errors(content))


def test_shipped_files_name_the_schema_and_fit_it():
    whole = schema()
    for path in SHIPPED:
        first = path.read_text().splitlines()[0]
        relative = os.path.relpath(SCHEMA, path.parent)
        assert first == f"# yaml-language-server: $schema={relative}"
        assert problems(yaml.load(path.read_text(), Loader), whole) == [], path


@pytest.mark.parametrize(
    "line, is_legal",
    [
        ("eta: 0.5", True),
        ("eta: -1", False),
        ("eta: sage_grpo:0.7", True),
        ("eta: sage_grpo", False),
        ("etta: 0.5", False),
        ("batch_size: 2.5", False),
        ("enable_fsdp: perhaps", False),
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
    if is_legal and not line.startswith("debug"):
        read_settings(tmp_path / "run.yaml")
