"""configs/settings.schema.json, with which editors complete and check the settings of a run.

An editor with a YAML language server uses it for a file whose first line is

    # yaml-language-server: $schema=PATH/configs/settings.schema.json
"""

import json
from typing import Any

from hyvideo.settings.command_line import ENVIRONMENT
from hyvideo.settings.config import LEAVES, OBJECTIVE, SECTIONS
from hyvideo.settings.objectives import BUILT_IN
from hyvideo.settings.reference_flags import IGNORED, RENAMED, SIZES, SWITCHES
from hyvideo.settings.sections import Leaf, Switch

TRAITS = ("title", "description", "default", "choices", "decides", "is_path", "measured")


def text() -> str:
    """Return the content of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a YAML file of settings: pydantic's, of all sections and objectives.

    A setting that several objectives have may have the values of any of them.
    """
    forms = {OBJECTIVE: of_yaml({}, LEAVES[OBJECTIVE])}
    for section in (*SECTIONS.values(), *BUILT_IN.values()):
        for name, declared in section.model_json_schema()["properties"].items():
            known = forms.setdefault(name, [])
            known += [each for each in of_yaml(declared, LEAVES[name]) if each not in known]
    properties = {
        name: {"description": leaf.sentence, "default": leaf.default, "anyOf": forms[name]}
        for name, leaf in LEAVES.items()
    }
    reference = {"description": "Flag of the public reference."}
    flags = (*RENAMED, *SIZES, *SWITCHES, "video_bucket_hw_base_size", *IGNORED, "debug_.*")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Settings of post_train.py",
        "type": "object",
        "properties": properties | {ENVIRONMENT: {"type": "object"}},
        "patternProperties": {f"^{flag}$": reference for flag in flags},
        "additionalProperties": False,
    }


def of_yaml(declared: dict[str, Any], leaf: Leaf) -> list[dict[str, Any]]:
    """Return pydantic's schema of a setting, and those of the other forms that a file may have."""
    if leaf.choices:
        return [{"enum": leaf.choices}, {"type": "string", "pattern": r"\.py:"}]
    forms = [{name: value for name, value in declared.items() if name not in TRAITS}]
    if leaf.kind is Switch:
        forms.append({"type": "boolean"})
    if leaf.name in ("reward_model", "held_out_reward_model"):
        forms += [{"type": "object"}, {"type": "array", "items": {"type": ["string", "object"]}}]
    if leaf.is_list:
        forms.append({"type": "string"})  # a single element
    if leaf.kind is str:
        forms.append({"type": "number"})  # such as sigmas: 1
    if leaf.name in ("reward_weights", "reward_config"):
        forms.append({"type": "object"})
    return forms
